"""Decode tokens per second at long contexts: Ingot and llama.cpp, 4-bit weights, KV caches of the same precision.

    python -m benchmarks.cpu.setup_peers     # once: a virtual environment with the peers
    python -m benchmarks.cpu.long_context

Weights are random, in the shape of TinyLlama-1.1B; one sequence, greedily. Engines take turns in rounds, in both
orders, and a ratio is that of two rates of one round. Results are written after each case.

Contexts are filled by copies: the first 512 tokens of a prompt are computed, and their keys and values are copied to
the later positions. The cost of a decode step depends on how many tokens are cached, not on their values. The cases
named "fill check" test this at 2048 tokens: the same engine decodes after copies and after a prompt that it computed.
Each round decodes from the same position.
"""

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import click

from benchmarks.adapters.base import Setup, Timing
from benchmarks.cpu.rounds import Figure, order_of_round
from benchmarks.cpu.turns import measure_quietly
from benchmarks.device import available_cores, device_facts
from benchmarks.kv.synthetic_artifacts import WORK_FOLDER, synthetic_artifact
from benchmarks.paths import RESULTS
from benchmarks.peers import PEERS_VENV, Peer, PeerFailed, PeerProcess, Programs, Sequences, prepare
from benchmarks.shapes import SHAPES

RECIPE = "int4-kv8-cpu"
SHAPE = SHAPES["tinyllama-1.1b"]
GGML_KV: Mapping[str, str] = {"float16": "f16", "int8": "q8_0"}  # Ingot's precision -> llama.cpp's type
INGOT, LLAMA_CPP = "ingot", "llama.cpp"
COMPUTED = " computed"  # suffix of an engine whose prompt is computed whole
_MOST_CONTEXT = 32768  # of the checkpoint
_COMPUTED_TOKENS = 512
_CHECKED_TOKENS = 2048
_SEED = 0  # of the prompt, the same in all rounds: engines keep its keys and values


@dataclass(frozen=True)
class Case:
    """One measurement: a comparison of the two engines, or of copied and computed contexts within each engine."""

    kind: Literal["comparison", "fill check"]
    threads: int
    kv_precision: str
    context_tokens: int

    def __str__(self) -> str:
        return f"{self.kind}, KV {self.kv_precision}, {self.context_tokens} tokens of context, threads {self.threads}"

    @property
    def ratios(self) -> dict[str, tuple[str, str]]:
        """Name of each ratio -> its numerator and denominator."""
        if self.kind == "comparison":
            return {f"{INGOT} / {LLAMA_CPP}": (INGOT, LLAMA_CPP)}
        return {f"{name}: copied / computed": (name, name + COMPUTED) for name in (INGOT, LLAMA_CPP)}


def cases(threads: Sequence[int], precisions: Sequence[str], contexts: Sequence[int]) -> list[Case]:
    """The comparisons, longest contexts last within a pair of engines; then the checks, on the most threads."""
    compared = [
        Case("comparison", count, kv, tokens) for count in threads for kv in precisions for tokens in sorted(contexts)
    ]
    return compared + [Case("fill check", max(threads), kv, _CHECKED_TOKENS) for kv in precisions]


def groups(wanted: Sequence[Case]) -> list[list[Case]]:
    """Cases that the same processes measure, in order."""
    found: dict[tuple[str, int, str], list[Case]] = {}
    for case in wanted:
        found.setdefault((case.kind, case.threads, case.kv_precision), []).append(case)
    return list(found.values())


def engines(case: Case, artifact: Path) -> dict[str, Peer]:
    """The adapters of a case, by name."""
    ours = {"artifact": str(artifact)}
    theirs = {"kv": GGML_KV[case.kv_precision]}
    found = {}
    for suffix, computed in {"": _COMPUTED_TOKENS, COMPUTED: case.context_tokens}.items():
        if suffix and case.kind == "comparison":
            continue
        options = {"computed_tokens": computed}
        label = f"KV {case.kv_precision}{suffix}"
        module = "benchmarks.adapters.ingot_long_context"
        found[INGOT + suffix] = Peer(f"Ingot int4, {label}", module, "this", {**ours, **options})
        module = "benchmarks.adapters.llama_cpp_long_context"
        found[LLAMA_CPP + suffix] = Peer(
            f"llama.cpp Q4_0, {label}", module, "peers", {**theirs, **options, "file_type": "q4_0"}
        )
    return found


def record(case: Case, rounds: Sequence[Mapping[str, Figure]], decoded_tokens: int) -> dict[str, Any]:
    """A case's figures: tokens per second and ratios of each round, and their medians."""
    rates = [{name: figure.tokens_per_second for name, figure in each.items()} for each in rounds]
    ratios = [{name: each[over] / each[under] for name, (over, under) in case.ratios.items()} for each in rates]
    return {
        **asdict(case),
        "decoded_tokens": decoded_tokens,
        "tokens_per_second": _medians(rates),
        "ratio": _medians(ratios),
        "rounds": [
            {
                "tokens_per_second": rate,
                "ratio": ratio,
                "other_cores": {name: round(figure.other_cores, 3) for name, figure in each.items()},
                "disturbed": [name for name, figure in each.items() if not figure.is_quiet],
            }
            for each, rate, ratio in zip(rounds, rates, ratios, strict=True)
        ],
    }


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: tokens per second of each comparison, medians, and the ratio from the lowest to the highest round."""
    lines = [
        "| threads | KV | context | Ingot | llama.cpp | Ingot / llama.cpp (rounds) |",
        "|---|---|---|---|---|---|",
    ]
    for row in results:
        if row["kind"] != "comparison":
            continue
        name = f"{INGOT} / {LLAMA_CPP}"
        each = [one["ratio"][name] for one in row["rounds"]]
        rates = row["tokens_per_second"]
        lines.append(
            f"| {row['threads']} | {row['kv_precision']}, {GGML_KV[row['kv_precision']]} | {row['context_tokens']} "
            f"| {rates[INGOT]:.1f} | {rates[LLAMA_CPP]:.1f} "
            f"| {row['ratio'][name]:.2f} ({min(each):.2f} to {max(each):.2f}) |"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Plan:
    """Options of the command line."""

    rounds: int
    decoded_tokens: int
    patience_seconds: float
    work_folder: Path
    programs: Programs

    def setup(self, group: Sequence[Case]) -> Setup:
        """The setup of a group's engines."""
        tokens = max(case.context_tokens for case in group) + 1 + self.decoded_tokens
        return Setup(SHAPE.name, _MOST_CONTEXT, self.work_folder, group[0].threads, 1, tokens, tokens)


def run_group(plan: Plan, group: Sequence[Case], versions: dict[str, object]) -> Iterator[dict[str, Any]]:
    """Start the engines of a group, and yield the record of each case; fills `versions`."""
    artifact = synthetic_artifact(
        SHAPE,
        RECIPE,
        context_tokens=_MOST_CONTEXT,
        folder=plan.work_folder,
        overrides=(f"passes.quantize-kv-cache.precision={group[0].kv_precision}",),
    )
    with ExitStack() as stack:
        running = {}
        for name, peer in engines(group[0], artifact.path).items():
            facts = prepare(peer, plan.setup(group), plan.programs)
            running[name] = stack.enter_context(PeerProcess(peer, plan.setup(group), facts, plan.programs))
            versions[peer.label] = asdict(facts)
        for case in group:
            started = time.perf_counter()
            found = record(case, measure_rounds(plan, case, running), plan.decoded_tokens)
            seconds = time.perf_counter() - started
            yield found | {"seconds": round(seconds, 1)}


def measure_rounds(plan: Plan, case: Case, running: Mapping[str, PeerProcess]) -> list[dict[str, Figure]]:
    """Figures of all engines, round by round, in alternating order; a first decode fills the contexts."""
    sequences = Sequences(1, case.context_tokens, case.context_tokens + 1 + plan.decoded_tokens)

    def decode(peer: PeerProcess) -> Timing:
        peer.start(sequences, _SEED)
        return peer.decode(sequences, _SEED, plan.decoded_tokens, max_seconds=float("inf"))

    for peer in running.values():
        decode(peer)
    return [
        {
            name: measure_quietly(running[name], decode, 1, plan.patience_seconds)
            for name in order_of_round(list(running), number)
        }
        for number in range(plan.rounds)
    ]


@click.command(help=__doc__)
@click.option("--threads", multiple=True, type=click.IntRange(min=1), help="Default: 1, and all cores.")
@click.option("--kv", "precisions", multiple=True, type=click.Choice([*GGML_KV]), default=tuple(GGML_KV))
@click.option(
    "--context",
    "contexts",
    multiple=True,
    type=click.IntRange(_COMPUTED_TOKENS, _MOST_CONTEXT // 2),
    default=(4096, 16384),
    show_default=True,
    help="Cached tokens.",
)
@click.option("--tokens", type=click.IntRange(min=1), default=16, show_default=True, help="Decoded in a round.")
@click.option("--rounds", type=click.IntRange(min=2), default=6, show_default=True)
@click.option(
    "--patience", type=float, default=5.0, show_default=True, help="Seconds to wait for other processes, per figure."
)
@click.option(
    "--work", type=click.Path(path_type=Path), default=WORK_FOLDER, help="Checkpoint, artifacts, GGUF; made if missing."
)
@click.option("--peers-python", type=click.Path(path_type=Path), default=PEERS_VENV / "bin" / "python")
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "long-context.json")
def main(
    threads: tuple[int, ...],
    precisions: tuple[str, ...],
    contexts: tuple[int, ...],
    tokens: int,
    rounds: int,
    patience: float,
    work: Path,
    peers_python: Path,
    output: Path,
) -> None:
    """Measure all cases, write each, and print the table."""
    plan = Plan(rounds, tokens, patience, work.absolute(), Programs(peers_python))
    versions: dict[str, object] = {}
    results: list[dict[str, Any]] = []
    wanted = cases(threads or sorted({1, available_cores()}), precisions, contexts)
    for group in groups(wanted):
        try:
            for found in run_group(plan, group, versions):
                results.append(found)
                _write(output, versions, results)
                _show(group, found)
        except PeerFailed as error:
            raise click.ClickException(f"{group[0]}: an engine failed: {error}") from error
    click.echo(table(results))
    click.echo(f"written to {output}")


def _show(group: Sequence[Case], found: Mapping[str, Any]) -> None:
    case = next(one for one in group if one.context_tokens == found["context_tokens"])
    rates = ", ".join(f"{name} {rate:.2f} tokens/s" for name, rate in found["tokens_per_second"].items())
    ratios = ", ".join(f"{name} {ratio:.3f}" for name, ratio in found["ratio"].items())
    click.echo(f"{case}: {rates}; {ratios}; {found['seconds']} s")


def _write(path: Path, versions: Mapping[str, object], results: Sequence[Mapping[str, Any]]) -> None:
    content = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_facts(),
        "shape": asdict(SHAPE),
        "recipe": RECIPE,
        "computed_tokens": _COMPUTED_TOKENS,
        "engines": versions,
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, default=str) + "\n", "utf-8")


if __name__ == "__main__":
    main()
