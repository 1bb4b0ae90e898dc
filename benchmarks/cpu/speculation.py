r"""Speed of speculation next to plain decoding, on repetitive and on ordinary text.

    INGOT_THREADS=1 python -m benchmarks.cpu.speculation examples/models/stdlib-llama-6m --draft my-draft \
        --text examples/models/stdlib-llama-6m/heldout.txt
    INGOT_THREADS=1 python -m benchmarks.cpu.speculation examples/models/stdlib-mimo-6m \
        --text examples/models/stdlib-llama-6m/heldout.txt --output benchmarks/results/mtp.json

Builds the model by each recipe. In every round all engines generate from the same prompt in turns, and a ratio is that
of two times of one round. Two engines are plain: their ratio shows what the machine's noise makes of 1. Tokens are
compared; a difference is an error. Intervals are 95 % bootstrap intervals of the median over rounds.
"""

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import click

from benchmarks.cpu.rounds import interval, order_of_round
from benchmarks.device import device_facts
from benchmarks.paths import ROOT
from ingot import Engine, SamplingParams
from ingot.artifact import open_artifact
from ingot.artifact.programs.draft_head import DRAFT_HEAD_FILE
from ingot.builder import build
from ingot.runtime.asking.outputs import Completion
from ingot.runtime.speculation.counters import SpeculationMetrics
from ingot.runtime.speculation_options import DRAFT, LOOKUP, MTP, SUFFIX, SpeculationOptions

LEAST_RATIO = 0.97
PLAIN, PLAIN_AGAIN = "plain", "plain again"
_KV_BLOCKS = 256
_PROMPTS = 4  # of each kind
_UNMEASURED = ("evaluation=null", "latency=null", "generate=null", "gates={}")


@dataclass(frozen=True)
class Row:
    """One engine on one kind of text. Ratios are speeds next to the plain engine's of the same round."""

    recipe: str
    text: str
    temperature: float
    engine: str
    plain_tokens_per_second: float
    ratio: float
    low: float
    high: float
    rounds: int
    drafts: SpeculationMetrics | None = None

    @property
    def holds(self) -> bool:
        """Whether the interval allows a speed of LEAST_RATIO; the verdict on a bound that noise blurs."""
        return self.high >= LEAST_RATIO

    def record(self) -> dict[str, object]:
        """For JSON."""
        found = self.drafts or SpeculationMetrics()
        derived = {
            "accepted_per_position": [
                round(count / found.num_drafts, 3) for count in found.num_accepted_tokens_per_pos.values()
            ],
            "acceptance_rate": found.acceptance_rate,
            "mean_accepted_length": found.mean_accepted_length,
            "expected_accepted_length": found.expected_accepted_length,
        }
        return asdict(self) | (derived if found.num_drafts else {})


def prompts(text: str) -> dict[str, list[str]]:
    """Texts to continue, texts that are copied, and texts that are copied with edits."""
    places = range(3_000, 3_000 + 30_000 * _PROMPTS, 30_000)
    originals = [text[place + 10_000 : place + 10_700] for place in places]
    edited = [(each, each.replace("self", "this"), each.replace("self", "other")) for each in originals]
    return {
        "ordinary": [text[place : place + 500] for place in places],
        "repeated": [f"{each}\n{each}\n{each[:200]}" for each in originals],
        "edited": [f"{first}\n{second}\n{third[:250]}" for first, second, third in edited],
    }


def measure(
    engines: dict[str, Engine], recipe: str, text: str, kinds: Sequence[str], params: SamplingParams, rounds: int
) -> list[Row]:
    """Rows of the engines on prompts of one kind."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for prompt in kinds:  # not measured: prompts enter the prefix cache
        for engine in engines.values():
            engine.generate(prompt, params)
    before = {name: engine.metrics().speculation for name, engine in engines.items()}
    num_tokens = 0
    for number in range(rounds):
        prompt = kinds[number // 2 % len(kinds)]  # in both orders
        done: dict[str, Completion] = {}
        for name in order_of_round([*engines], number):
            started = time.perf_counter()
            done[name] = engines[name].generate(prompt, params)
            seconds[name].append(time.perf_counter() - started)
        if len({one.token_ids for one in done.values()}) > 1:
            raise click.ClickException(f"the engines gave different tokens for {prompt[:40]!r}")
        num_tokens = len(done[PLAIN].token_ids)
    speed = num_tokens / median(seconds[PLAIN])
    rows = []
    for name, engine in engines.items():
        if name == PLAIN:
            continue
        ratios = [plain / own for plain, own in zip(seconds[PLAIN], seconds[name], strict=True)]
        low, high = interval(ratios)
        found = since(before[name], engine.metrics().speculation)
        row = Row(recipe, text, params.temperature, name, speed, median(ratios), low, high, rounds, found)
        rows.append(row)
    return rows


def since(before: SpeculationMetrics | None, after: SpeculationMetrics | None) -> SpeculationMetrics | None:
    """Metrics of the rounds alone; None for an engine without speculation."""
    if not before or not after:
        return None
    return SpeculationMetrics(
        num_drafts=after.num_drafts - before.num_drafts,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        num_tested_tokens=after.num_tested_tokens - before.num_tested_tokens,
        num_accepted_tokens=after.num_accepted_tokens - before.num_accepted_tokens,
        num_accepted_tokens_per_pos=_less(after.num_accepted_tokens_per_pos, before.num_accepted_tokens_per_pos),
        num_drafts_per_length=_less(after.num_drafts_per_length, before.num_drafts_per_length),
        num_drafts_by_kind=_less(after.num_drafts_by_kind, before.num_drafts_by_kind),
        num_draft_tokens_by_kind=_less(after.num_draft_tokens_by_kind, before.num_draft_tokens_by_kind),
        num_accepted_tokens_by_kind=_less(after.num_accepted_tokens_by_kind, before.num_accepted_tokens_by_kind),
    )


def _less(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {key: count - before.get(key, 0) for key, count in after.items()}


def measure_recipe(recipe: str, model: Path, draft: Path | None, text: str, tokens: int, rounds: int) -> list[Row]:
    """Build the model by a recipe and measure every text and temperature."""
    with tempfile.TemporaryDirectory() as folder:
        target, small = Path(folder) / "target", Path(folder) / "draft"
        build(recipe, [f"checkpoint={model}", *_UNMEASURED], target)
        chosen: dict[str, SpeculationOptions | None] = {PLAIN: None, PLAIN_AGAIN: None}
        chosen[LOOKUP], chosen[SUFFIX] = SpeculationOptions(LOOKUP), SpeculationOptions(SUFFIX)
        if open_artifact(target).has(DRAFT_HEAD_FILE):
            chosen |= {name: SpeculationOptions(name) for name in (MTP, f"{SUFFIX}+{MTP}")}
        if draft:
            build(recipe, [f"checkpoint={draft}", *_UNMEASURED], small)
            chosen[DRAFT] = SpeculationOptions(small)
            chosen[f"{SUFFIX}+{DRAFT}"] = SpeculationOptions((SUFFIX, small))
        engines = {name: Engine.load(target, speculation=one, kv_blocks=_KV_BLOCKS) for name, one in chosen.items()}
        rows = []
        for temperature in (0.0, 0.8):
            for kind, kinds in prompts(text).items():
                params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=temperature, seed=0)
                rows += measure(engines, recipe, kind, kinds, params, rounds)
                show(rows[-len(engines) + 1 :])
        for engine in engines.values():
            engine.close()
    return rows


def show(rows: Sequence[Row]) -> None:
    """Print a line for each row."""
    for row in rows:
        found = row.drafts or SpeculationMetrics()
        click.echo(
            f"{row.recipe}, {row.text}, temperature {row.temperature}, {row.engine}: {row.ratio:.3f} ({row.low:.3f} to"
            f" {row.high:.3f}) of {row.plain_tokens_per_second:.0f} tokens/s; {found.num_draft_tokens} drafts, accepted"
            f" {found.acceptance_rate or 0:.2f}, length {found.mean_accepted_length or 1:.2f}"
            f" (if independent {found.expected_accepted_length or 1:.2f})"
        )


@click.command(help=__doc__)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--draft", type=click.Path(path_type=Path), help="Checkpoint of a draft model.")
@click.option("--text", type=click.Path(path_type=Path), required=True, help="Text to take prompts from.")
@click.option("--recipe", "recipes", multiple=True, default=("fp32-cpu", "int4-cpu"), show_default=True)
@click.option("--tokens", default=256, show_default=True)
@click.option("--rounds", default=40, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/speculation.json")
def main(
    model: Path, draft: Path | None, text: Path, recipes: tuple[str, ...], tokens: int, rounds: int, output: Path
) -> None:
    """Measure, print and write the result."""
    rows = [
        row
        for recipe in recipes
        for row in measure_recipe(recipe, model, draft, text.read_text("utf-8"), tokens, rounds)
    ]
    below = [row for row in rows if not row.holds]
    click.echo(f"{len(rows)} rows, {len(below)} of them below {LEAST_RATIO}")
    facts = {
        "device": device_facts(),
        "measured_at": time.strftime("%Y-%m-%d", time.gmtime()),
        "model": model.name,
        "threads": os.environ.get("INGOT_THREADS", "one per core"),
        "tokens": tokens,
        "results": [row.record() for row in rows],
    }
    output.write_text(json.dumps(facts, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
