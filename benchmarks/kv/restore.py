"""Time to the first token of a prompt whose prefix is computed, on the device, in host memory, or on disk.

    python -m benchmarks.kv.restore artifacts/demo --tokens 1000 --new-tokens 16

Each round has a prompt of its own: computed, then found on the device, then evicted and restored from host memory, then
restored from disk by an engine that was loaded after a restart. So rounds are interleaved, and each restored time is
divided by the computed one of its round. The logits of all four must be equal bit for bit. What disk reads is in the
page cache of the system, as it is after a restart of the process alone.
"""

import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.device import device_facts
from ingot.artifact import Artifact, open_artifact
from ingot.runtime import Completion, Engine, SamplingParams

PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)


def first_token(engine: Engine, prompt: list[int], kept: list[Completion]) -> tuple[str, float]:
    """Generate; returns the tier that the prefix came from and the time to the first token in seconds."""
    completion = engine.generate(prompt, PARAMS, keep_logits=True)
    kept.append(completion)
    tiers = completion.cached_tokens_by_tier._asdict()
    seconds = completion.metrics.ttft_seconds
    assert seconds is not None
    return (max(tiers, key=tiers.__getitem__) if any(tiers.values()) else "computed"), seconds


def measure(artifact: Artifact, num_tokens: int, new_tokens: int, rounds: int, threads: int | None) -> dict[str, Any]:
    """Seconds of every round by tier, and the cost model's estimates."""
    rng, seconds = np.random.default_rng(0), defaultdict(list)
    vocabulary, block = artifact.manifest.model.vocab_size, artifact.manifest.kv.block_tokens
    blocks = -(-(num_tokens + new_tokens) // block) + 4
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "kv_blocks": blocks,
            "kv_host_bytes": 4 * blocks * artifact.manifest.kv.block_bytes,
            "kv_disk_path": Path(folder) / "kv",
            "kv_disk_bytes": 1 << 33,
            "num_threads": threads,
        }
        with Engine.load(artifact, kv_blocks=blocks, num_threads=threads) as warm:
            warm.generate(rng.integers(3, vocabulary, num_tokens).tolist(), PARAMS)
        for _ in range(rounds):
            prefix = rng.integers(3, vocabulary, num_tokens).tolist()
            ends = rng.integers(3, vocabulary, (3, new_tokens)).tolist()
            kept: list[Completion] = []
            with Engine.load(artifact, **options) as engine:
                found = [first_token(engine, prefix + ends[0], kept) for _ in range(2)]
                engine.generate(rng.integers(3, vocabulary, num_tokens).tolist(), PARAMS)
                found.append(first_token(engine, prefix + ends[0], kept))
                costs = engine._loop.scheduler.tiers
                assert costs is not None
                estimate = {
                    "host_ms_per_block": costs.costs.block_seconds("host") * 1e3,
                    "compute_ms_per_block": (costs.costs.token_seconds(num_tokens) or 0) * block * 1e3,
                }
            with Engine.load(artifact, **options) as engine:
                found.append(first_token(engine, prefix + ends[0], kept))
            assert all(np.array_equal(each.logits, kept[0].logits) for each in kept), "logits differ"  # type: ignore[arg-type]
            for tier, taken in found:
                seconds[tier].append(taken)
    return {"seconds": dict(seconds), "estimate": estimate, "block_bytes": artifact.manifest.kv.block_bytes}


@click.command()
@click.argument("artifact", type=click.Path(exists=True, path_type=Path))
@click.option("--tokens", default=1000, help="Tokens of the prefix.")
@click.option("--new-tokens", default=16, help="Tokens after it.")
@click.option("--rounds", default=5)
@click.option("--threads", type=int)
def main(artifact: Path, tokens: int, new_tokens: int, rounds: int, threads: int | None) -> None:
    """Print times and ratios as JSON."""
    result = measure(open_artifact(artifact), tokens, new_tokens, rounds, threads)
    computed = result["seconds"]["computed"]
    for tier, taken in result["seconds"].items():
        ratios = [one / other for one, other in zip(taken, computed, strict=True)]
        click.echo(
            f"{tier:9} {statistics.median(taken) * 1e3:9.2f} ms   {statistics.median(ratios):.3f} of computed"
            f" ({min(ratios):.3f} to {max(ratios):.3f})"
        )
    click.echo(json.dumps({"tokens": tokens, "new_tokens": new_tokens, **result, "device": device_facts()}))


if __name__ == "__main__":
    main()
