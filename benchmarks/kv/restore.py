"""Time to the first token of a prompt whose prefix is computed, on the device, in host memory, or on disk.

    python -m benchmarks.kv.restore --output benchmarks/results/kv-restore.json      # the shape of TinyLlama, 4 bits
    python -m benchmarks.kv.restore --set cpu.attention=bfloat16                     # with an option of the recipe
    python -m benchmarks.kv.restore --artifact artifacts/demo --case 400,16,3 --crossover-tokens 256

A case is PREFIX,NEW,COLD: tokens of the prefix, of the prompt after it, and prompts that are computed. Each of these is
computed, and then answered `--rounds` times with its prefix on the device, in host memory alone, and on disk alone, by
an engine that was loaded again: once after the folder's files left the system's page cache, once while they are in it.
(A virtual machine's disk may have a cache of its own, which stays.) Each time is divided by the computed one of its
prompt. All logits must be equal bit for bit.

The crossover is the shortest prefix, among lengths that double, from which on restoring was faster than computing in
the median; it stands next to the one that the engine's cost model predicts.
"""

import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
import numpy as np

from benchmarks.device import device_facts
from benchmarks.kv.prefix_places import Case, Conversation, drop_from_page_cache
from benchmarks.kv.synthetic_artifacts import WORK_FOLDER, synthetic_artifact
from benchmarks.shapes import SHAPES
from ingot.artifact import Artifact, open_artifact
from ingot.runtime.kv.cost_model import CostModel, TierName

_CONTEXT_TOKENS = 32768
_CASES = ("2000,80,3", "4096,16,2", "16384,16,1")
_CROSSOVER_ROUNDS = 5


@dataclass
class Times:
    """Seconds to the first token by where the prefix was, and their ratios to the computed one of the same prompt."""

    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    ratios: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, place: str, seconds: float, computed: float) -> None:
        """Record one."""
        self.seconds[place].append(seconds)
        self.ratios[place].append(seconds / computed)

    def rows(self) -> dict[str, dict[str, object]]:
        """Milliseconds, their median, and the median of the ratios, by place."""
        return {
            place: {
                "ms": round(statistics.median(taken) * 1e3, 3),
                "of_computed": round(statistics.median(self.ratios[place]), 5),
                "faster": round(1 / statistics.median(self.ratios[place]), 2),
                "all_ms": [round(each * 1e3, 3) for each in taken],
            }
            for place, taken in self.seconds.items()
        }


@dataclass(frozen=True)
class Setting:
    """Artifact and options of all measurements."""

    artifact: Artifact
    threads: int | None
    folder: Path | None
    rng: np.random.Generator

    def prompt(self, num_tokens: int) -> list[int]:
        """A prompt that no other begins like."""
        tokens: list[int] = self.rng.integers(3, self.artifact.manifest.model.vocab_size, num_tokens).tolist()
        return tokens


def measure_case(setting: Setting, case: Case, rounds: int) -> dict[str, object]:
    """Times of a case, and seconds per block that the cost model has learned."""
    times, dropped, started = Times(), [], time.perf_counter()
    for _ in range(case.cold_rounds):
        prompt = setting.prompt(case.prefix_tokens + case.new_tokens)
        with tempfile.TemporaryDirectory(dir=setting.folder) as base:
            folder = Path(base) / "kv"
            with closing(Conversation(setting.artifact, folder, case, setting.threads, prompt)) as conversation:
                conversation.warm_up()
                computed = conversation.first_token("computed")
                times.add("computed", computed, computed)
                for place in ("device", "host"):
                    for _ in range(rounds):
                        conversation.move(place)
                        times.add(place, conversation.first_token(place), computed)
                learned = _learned(conversation.costs, case, setting.artifact.manifest.kv.block_tokens)
                conversation.move("disk")
                conversation.restart()
                for name in ("disk, dropped from the page cache", "disk, in the page cache"):
                    for _ in range(rounds):
                        conversation.move("disk")
                        if "dropped" in name:
                            dropped.append(drop_from_page_cache(folder))
                        times.add(name, conversation.first_token("disk"), computed)
                learned["disk_ms_per_block"] = round(conversation.costs.block_seconds("disk") * 1e3, 4)
    rows = times.rows()
    return {
        **asdict(case),
        "places": rows,
        "share_of_files_dropped": round(min(dropped), 3),
        "cost_model": learned,
        "seconds": round(time.perf_counter() - started, 1),
    }


def _learned(costs: CostModel, case: Case, block_tokens: int) -> dict[str, float]:
    compute = (costs.token_seconds(case.prefix_tokens) or 0.0) * block_tokens
    host = costs.block_seconds("host")
    return {"compute_ms_per_block": round(compute * 1e3, 4), "host_ms_per_block": round(host * 1e3, 4)}


def measure_crossover(setting: Setting, most_tokens: int, new_tokens: int) -> dict[str, object]:
    """Times to the first token for prefixes of 1, 2, 4 ... blocks, and the crossovers by measurement and model."""
    block = setting.artifact.manifest.kv.block_tokens
    lengths = [block << power for power in range(20) if block << power <= most_tokens]
    tiers: tuple[TierName, ...] = ("host", "disk")
    rows, predictions = [], []
    for tokens in lengths:
        case, times = Case(tokens, new_tokens, 1), Times()
        predicted: dict[TierName, bool] = {}
        for _ in range(_CROSSOVER_ROUNDS):
            prompt = setting.prompt(tokens + new_tokens)
            with tempfile.TemporaryDirectory(dir=setting.folder) as base:
                folder = Path(base) / "kv"
                with closing(Conversation(setting.artifact, folder, case, setting.threads, prompt)) as conversation:
                    conversation.warm_up()
                    conversation.first_token("computed")
                    for _ in range(2):  # the second one is measured: both have warm memory then
                        conversation.move("computed")
                        computed = conversation.first_token("computed")
                    times.add("computed", computed, computed)
                    for tier in tiers:
                        conversation.move(tier)
                        times.add(tier, conversation.first_token(tier), computed)
                    for tier in tiers:
                        predicted[tier] = conversation.would_restore(tier)
        predictions.append(predicted)
        rows.append({"prefix_tokens": tokens, **times.rows()})
        click.echo(_line(f"{tokens} + {new_tokens}", times))
    measured = {
        tier: _crossover(lengths, [row[tier]["of_computed"] < 1 for row in rows])  # type: ignore[index]
        for tier in tiers
    }
    predicted_tokens = {tier: _crossover(lengths, [each[tier] for each in predictions]) for tier in tiers}
    return {"rows": rows, "measured_tokens": measured, "predicted_tokens": predicted_tokens}


def _crossover(lengths: Sequence[int], wins: Sequence[bool]) -> int | None:
    """The shortest length from which on all win; None if the longest does not."""
    lost = [index for index, won in enumerate(wins) if not won]
    first = lost[-1] + 1 if lost else 0
    return lengths[first] if first < len(lengths) else None


def _line(name: str, times: Times) -> str:
    cells = [f"{place} {row['ms']:.1f} ms ({row['of_computed']:.4f})" for place, row in times.rows().items()]
    return f"{name}: {'; '.join(cells)}"


@click.command()
@click.option("--artifact", type=click.Path(exists=True, path_type=Path), help="Default: the shape of TinyLlama.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Options of its recipe, int4-cpu.")
@click.option("--work-folder", type=click.Path(path_type=Path), default=WORK_FOLDER, help="Where that is built.")
@click.option("--case", "cases", multiple=True, default=_CASES, show_default=True, help="PREFIX,NEW,COLD tokens.")
@click.option("--rounds", default=3, show_default=True, help="Answers per prompt and place.")
@click.option("--crossover-tokens", default=256, show_default=True, help="Longest prefix of the crossover; 0: none.")
@click.option("--threads", type=int)
@click.option("--folder", type=click.Path(path_type=Path), help="Where the disk tier's folders are made.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the result as JSON.")
def main(
    artifact: Path | None,
    overrides: tuple[str, ...],
    work_folder: Path,
    cases: tuple[str, ...],
    rounds: int,
    crossover_tokens: int,
    threads: int | None,
    folder: Path | None,
    output: Path | None,
) -> None:
    """Measure all cases, then the crossover."""
    parsed = [Case.parse(case) for case in cases]
    if artifact and overrides:
        raise click.UsageError("--set changes the recipe of the built artifact; --artifact has its own")
    if artifact:
        model = open_artifact(artifact)
    else:
        model = synthetic_artifact(
            SHAPES["tinyllama-1.1b"],
            "int4-cpu",
            context_tokens=_CONTEXT_TOKENS,
            folder=work_folder,
            overrides=overrides,
        )
    setting = Setting(model, threads, folder, np.random.default_rng(0))
    document: dict[str, object] = {
        "device": device_facts(),
        "artifact": model.path.name,
        "set": list(overrides),
        "block_bytes": model.manifest.kv.block_bytes,
        "rounds": rounds,
    }
    results = []
    for case in parsed:
        results.append(measure_case(setting, case, rounds))
        click.echo(json.dumps(results[-1]))
        _write({**document, "cases": results}, output)
    if crossover_tokens:
        document["crossover"] = measure_crossover(setting, crossover_tokens, new_tokens=16)
    _write({**document, "cases": results}, output)
    click.echo(json.dumps(document.get("crossover", {})))


def _write(document: dict[str, object], output: Path | None) -> None:
    """Also after each case, so that an interrupted run leaves what it has."""
    if output:
        output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
