"""Speed of speculation next to plain decoding, on repetitive and on ordinary text.

    python -m benchmarks.cpu.speculation artifacts/demo --draft artifacts/draft --text heldout.txt --output result.json

Plain and speculating engines take turns in every round, and the ratio of their speeds is that of the same round. Tokens
are compared: a difference is an error. `--clock cpu` counts the processor time of this process, on one thread, which a
busy machine disturbs least.
"""

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import click

from ingot import Engine, SamplingParams
from ingot.runtime.outputs import Completion
from ingot.runtime.speculation.options import LOOKUP, SpeculationOptions

_CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.process_time, "wall": time.perf_counter}


def prompts(text: str) -> dict[str, str]:
    """A text to continue, a text that is copied, and a text that is copied with edits."""
    original = text[20_000:21_200]
    return {
        "ordinary": text[3_000:4_500],
        "repeated": f"{original}\n{original}\n{original[:300]}",
        "edited": f"{original}\n{original.replace('self', 'this')}\n{original.replace('self', 'other')[:400]}",
    }


def measure(
    engines: dict[str, Engine], prompt: str, params: SamplingParams, rounds: int, clock: str
) -> dict[str, object]:
    """Speeds of the engines on one prompt, in tokens per second, and ratios to the plain one."""
    now = _CLOCKS[clock]
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    before = {name: engine.metrics().speculation for name, engine in engines.items()}
    num_tokens = 0
    names = [*engines]
    for _ in range(rounds):
        done: dict[str, Completion] = {}
        names = [*names[1:], names[0]]  # no engine is always the first
        for name in names:
            started = now()
            done[name] = engines[name].generate(prompt, params)
            seconds[name].append(now() - started)
        if len({one.token_ids for one in done.values()}) > 1:
            raise click.ClickException(f"the engines gave different tokens for {prompt[:40]!r}")
        num_tokens = len(done["plain"].token_ids)
    found: dict[str, object] = {"plain_tokens_per_second": num_tokens / median(seconds["plain"])}
    for name, engine in engines.items():
        after, start = engine.metrics().speculation, before[name]
        if after and start:
            ratios = [plain / own for plain, own in zip(seconds["plain"], seconds[name], strict=True)]
            found[name] = {
                "ratio": median(ratios),
                "ratios": [round(ratio, 3) for ratio in ratios],
                "drafts": after.num_draft_tokens - start.num_draft_tokens,
                "accepted": after.num_accepted_tokens - start.num_accepted_tokens,
            }
    return found


@click.command(help=__doc__)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--draft", type=click.Path(path_type=Path), help="Artifact of a draft model.")
@click.option("--text", type=click.Path(path_type=Path), required=True, help="Text to take prompts from.")
@click.option("--tokens", default=256, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("--clock", type=click.Choice(list(_CLOCKS)), default="wall", show_default=True)
@click.option("--output", type=click.Path(path_type=Path))
def main(
    artifact: Path, draft: Path | None, text: Path, tokens: int, rounds: int, clock: str, output: Path | None
) -> None:
    """Measure, print and write the result."""
    threads = 1 if clock == "cpu" else None
    chosen: dict[str, SpeculationOptions | None] = {"plain": None, LOOKUP: SpeculationOptions(LOOKUP)}
    if draft:
        chosen["draft"] = SpeculationOptions(draft)
    engines = {name: Engine.load(artifact, speculation=one, num_threads=threads) for name, one in chosen.items()}
    for engine in engines.values():
        if engine._speculator:
            engine._speculator.clock = _CLOCKS[clock]
    results: dict[str, object] = {}
    for temperature in (0.0, 0.8):
        for name, prompt in prompts(text.read_text("utf-8")).items():
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=temperature, seed=0)
            found = measure(engines, prompt, params, rounds, clock)
            results[f"{name}, temperature {temperature}"] = found
            click.echo(f"{name}, temperature {temperature}: {json.dumps(found)}")
    if output:
        facts = {"artifact": str(artifact), "clock": clock, "machine": platform.processor() or platform.machine()}
        output.write_text(json.dumps({**facts, "results": results}, indent=1), "utf-8")


if __name__ == "__main__":
    main()
