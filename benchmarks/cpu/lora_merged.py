"""16 LoRA adapters in one batch next to their merged models, and rows without an adapter next to an engine without any.

    python -m benchmarks.cpu.lora_merged                          # the demo model, in 32-bit floats
    python -m benchmarks.cpu.lora_merged MODEL --rank 16 --recipe int8-cpu

Writes random adapters that change every linear layer but a head that shares the embedding, merges each into the
checkpoint and builds that (`adapter` of a recipe), and generates greedily with all adapters and without one in the same
batch. Each adapter's logits are compared with those of its merged model as long as both chose the same tokens: the
largest difference, over the largest logit. With 32-bit weights both compute the same function. Logits without an
adapter must have the bits of an engine that has none. Exit code 1 where they differ, or an adapter's are further from
its merged model's than --tolerance.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
from safetensors.numpy import load_file, save_file
from tests.simulators.peft_folders import write_adapter

from benchmarks.device import device_facts
from benchmarks.paths import ROOT
from ingot.artifact import Artifact, open_artifact
from ingot.artifact.programs.cpu_program_checks import read_operations
from ingot.builder import build
from ingot.runtime import Completion, Engine, RequestOptions, SamplingParams

_UNMEASURED = ("evaluation=null", "latency=null", "generate=null", "gates={}")
_SEED = 7
_PROMPTS = (
    "def read_file(path):",
    "import os\n",
    "class Reader:\n    def __init__(self",
    "for name in sorted(",
    "    raise ValueError(",
)


def checkpoint_of_floats(model: Path, folder: Path) -> Path:
    """A copy of a checkpoint with 32-bit weights, so that a merged weight is not rounded."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    save_file({name: tensor.astype(np.float32) for name, tensor in load_file(file).items()}, file)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}), "utf-8")
    return folder


def built(recipe: str, checkpoint: Path, output: Path, adapter: Path | None = None) -> Artifact:
    """The artifact of a checkpoint, with an adapter merged into it or not."""
    merged = [] if adapter is None else [f"adapter={adapter}"]
    build(recipe, [f"checkpoint={checkpoint}", *_UNMEASURED, *merged], output)
    return open_artifact(output)


def difference(found: Completion, merged: Completion) -> tuple[float, int]:
    """The largest difference of logits over the largest logit, and the tokens up to which both chose the same."""
    assert found.logits is not None
    assert merged.logits is not None
    pairs = enumerate(zip(found.token_ids, merged.token_ids, strict=True))
    same = next((number for number, (one, other) in pairs if one != other), len(found.token_ids))
    rows = slice(0, same + 1)  # the first different token was chosen from logits of the same tokens
    gap = np.abs(found.logits[rows] - merged.logits[rows]).max()
    return float(gap / np.abs(merged.logits[rows]).max()), same


def _bits(done: Completion) -> bytes:
    assert done.logits is not None
    return done.logits.tobytes()


def compare(artifact: Artifact, adapters: dict[str, Path], merged: dict[str, Path], max_tokens: int) -> dict[str, Any]:
    """All adapters in one batch, next to their merged models; as many requests have none."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    prompts = [_PROMPTS[number % len(_PROMPTS)] for number in range(len(adapters))]
    with Engine.load(artifact) as engine:
        plain = engine.generate(prompts, params, keep_logits=True)
    names = [*adapters, *[None] * len(adapters)]
    with Engine.load(artifact, adapters=adapters, max_adapters=len(adapters)) as engine:
        options = [RequestOptions(adapter=name) for name in names]
        together = engine.generate(prompts * 2, params, options=options, keep_logits=True)
        steps = engine.metrics().num_steps
    gaps, same = [], []
    for name, prompt, found in zip(adapters, prompts, together, strict=False):
        with Engine.load(open_artifact(merged[name])) as engine:
            gap, num_tokens = difference(found, engine.generate(prompt, params, keep_logits=True))
        gaps.append(gap)
        same.append(num_tokens)
    base = together[len(adapters) :]
    return {
        "adapters": len(adapters),
        "requests_in_batch": len(names),
        "tokens_of_each": max_tokens,
        "steps": steps,
        "largest_difference_over_largest_logit": max(gaps),
        "tokens_until_the_first_difference": same,
        "texts_of_adapters_that_differ_from_base": sum(
            found.token_ids != own.token_ids for found, own in zip(together, plain, strict=False)
        ),
        "base_rows_bit_equal": all(
            found.token_ids == own.token_ids and _bits(found) == _bits(own)
            for found, own in zip(base, plain, strict=True)
        ),
    }


@click.command(help=__doc__)
@click.argument("model", default=str(ROOT / "examples/models/stdlib-llama-6m"), type=click.Path(path_type=Path))
@click.option("--recipe", default="fp32-cpu", show_default=True)
@click.option("--adapters", "number", default=16, show_default=True)
@click.option("--rank", default=8, show_default=True)
@click.option("--alpha", default=0.5, show_default=True, help="lora_alpha: the change is alpha / rank times B A.")
@click.option("--max-tokens", default=48, show_default=True)
@click.option("--tolerance", default=1e-4, show_default=True, help="Of the largest logit.")
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/lora-merged.json")
def main(
    model: Path, recipe: str, number: int, rank: int, alpha: float, max_tokens: int, tolerance: float, output: Path
) -> None:
    """Build, compare, print and write."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        checkpoint = checkpoint_of_floats(model, folder / "model")
        artifact = built(recipe, checkpoint, folder / "base")
        weights = load_file(checkpoint / "model.safetensors")
        projections = [each for each in read_operations(artifact).projections if f"{each.module}.weight" in weights]
        adapters, merged = {}, {}
        for each in range(number):
            name = f"adapter-{each}"
            adapters[name] = write_adapter(
                folder / name, seed=_SEED + each, rank=rank, projections=projections, alpha=alpha
            )
            merged[name] = folder / f"merged-{each}"
            built(recipe, checkpoint, merged[name], adapters[name])
        found = compare(artifact, adapters, merged, max_tokens)
    facts = {"device": device_facts(), "model": model.name, "recipe": recipe, "rank": rank, "alpha": alpha, **found}
    facts["tolerance"] = tolerance
    output.write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
    click.echo(json.dumps(facts, indent=2))
    sys.exit(not found["base_rows_bit_equal"] or found["largest_difference_over_largest_logit"] > tolerance)


if __name__ == "__main__":
    main()
