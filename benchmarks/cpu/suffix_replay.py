r"""Suffix decoding next to prompt lookup: drafts accepted in a step, tokens per second, and what the index costs.

    INGOT_THREADS=1 python -m benchmarks.cpu.suffix_replay artifacts/demo \
        --text examples/models/stdlib-llama-6m/heldout.txt

Three kinds of requests, each after the other by one tenant:

    agents   turns of agents that read a file, write a function of it again with an edit, and run the tests; contexts
             are cut, so that what is written again is often in no prompt. The tokens are given, not a model's: counted
             is how many drafts they accept, a step giving them and one more
    again    the same tasks four times, greedily, by the model
    samples  eight samples of each task at temperature 0.6, by the model

By the model, an engine of each kind takes its turn in every round; a ratio is that of two times of one round.
"""

import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import click

from benchmarks.cpu.rounds import interval, order_of_round
from benchmarks.device import device_facts
from benchmarks.paths import RESULTS
from ingot import Engine, SamplingParams
from ingot.artifact import open_artifact
from ingot.runtime.requests.sampler import Sampler
from ingot.runtime.scheduling.sequence import Sequence as Tokens
from ingot.runtime.speculation.drafter import Drafter, DraftRequest
from ingot.runtime.speculation.output_history import OutputHistory
from ingot.runtime.speculation.prompt_lookup import PromptLookup
from ingot.runtime.speculation_options import LOOKUP, SUFFIX, SpeculationOptions
from ingot.runtime.text.tokenizer import Tokenizer

_HISTORY = 1 << 18
_CONTEXT = 1500  # characters that an agent's context keeps
_FUNCTION = re.compile(r"\n    def (\w+)\(.*?(?=\n    def |\nclass |\ndef |\n\n\n)", re.DOTALL)


class Turn(NamedTuple):
    """A prompt and the output that it gets."""

    prompt: str
    output: str


def agent_turns(text: str, count: int) -> Iterator[Turn]:
    """The turns of `count` agents, one after the other; each edits a function of the text."""
    functions = [found for found in _FUNCTION.finditer(text) if 200 < len(found[0]) < 1500]
    for number, found in enumerate(random.Random(2).sample(functions, count)):
        path = f'"path": "src/module_{number % 7}.py"'
        edited = found[0].replace("self", "this")
        edit = f'{{"tool": "edit_file", "arguments": {{{path}, "new": %s}}}}\n'
        tests = (
            "Let me run the tests to see whether the change works.\n"
            '{"tool": "run_tests", "arguments": {"path": "tests", "timeout": 60}}\n'
        )
        turns = (
            (
                f"I look at the code of {found[1]} first.\n"
                f'{{"tool": "read_file", "arguments": {{{path}, "symbol": "{found[1]}"}}}}\n',
                found[0],
            ),
            (edit % json.dumps(edited), "done\n"),
            (tests, "1 failed\n"),
            (edit % json.dumps(edited.replace("return", "return  ")), "done\n"),
            (tests + "All tests pass. The change is done.\n", ""),
        )
        context = f"task {number}: call self this in {found[1]}\n"
        for output, answer in turns:
            yield Turn(context[-_CONTEXT:], output)
            context += output + answer


class Replay(NamedTuple):
    """Given outputs, as a drafter would have drafted them."""

    num_steps: int
    num_accepted: int
    draft_microseconds: float
    index_microseconds: float

    def record(self) -> dict[str, float]:
        """For JSON; microseconds of a step's drafts, and of an output's token when it is kept."""
        return {
            "accepted_per_step": round(self.num_accepted / self.num_steps, 3),
            "draft_microseconds": round(self.draft_microseconds, 1),
            "index_microseconds_per_token": round(self.index_microseconds, 2),
        }


def replay(drafter: Drafter, turns: Sequence[tuple[Sequence[int], Sequence[int]]], most: int) -> Replay:
    """Draft for each output [tokens] after its prompt [tokens], up to `most` in a step; drop what is wrong."""
    num_steps = num_accepted = 0
    drafting = indexing = 0.0
    for number, (prompt, output) in enumerate(turns):
        sequence = Tokens.of(number, prompt, len(output) + 1)
        request = DraftRequest(sequence, Sampler(SamplingParams(), sequence.tokens), most)
        place = 0
        while place < len(output):
            begin = time.perf_counter()
            drafts = drafter.propose([request])[0].tokens
            drafting += time.perf_counter() - begin
            right = 0
            while right < len(drafts) and place + right < len(output) and drafts[right] == output[place + right]:
                right += 1
            sequence.tokens.extend(output[place : place + right + 1])
            place += right + 1
            num_steps += 1
            num_accepted += right
        begin = time.perf_counter()
        drafter.forget(sequence)
        indexing += time.perf_counter() - begin
    num_tokens = sum(len(output) for _, output in turns)
    return Replay(num_steps, num_accepted, 1e6 * drafting / num_steps, 1e6 * indexing / num_tokens)


def measure(artifact: Path, tasks: Sequence[str], params: Sequence[SamplingParams], rounds: int) -> dict[str, object]:
    """Tokens per second of plain decoding, prompt lookup and suffix decoding, one request at a time."""
    kinds = {"plain": None, LOOKUP: SpeculationOptions(LOOKUP), SUFFIX: SpeculationOptions(SUFFIX)}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds):
        outputs = set()
        for name in order_of_round([*kinds], number):
            # A new engine, so that each round begins without a history.
            with Engine.load(artifact, speculation=kinds[name]) as engine:
                engine.generate(tasks[0], SamplingParams(max_tokens=8))
                begin = time.perf_counter()
                found = [engine.generate(task, each).token_ids for each in params for task in tasks]
                seconds[name].append(time.perf_counter() - begin)
            outputs.add(tuple(map(tuple, found)))
            num_tokens = sum(map(len, found))
        if len(outputs) > 1:
            raise click.ClickException("the engines gave different tokens")
    ratios = {
        name: [plain / own for plain, own in zip(seconds["plain"], seconds[name], strict=True)]
        for name in (LOOKUP, SUFFIX)
    }
    return {
        "plain_tokens_per_second": round(num_tokens / median(seconds["plain"]), 1),
        **{
            name: {"ratio": round(median(each), 3), "interval": [round(bound, 3) for bound in interval(each)]}
            for name, each in ratios.items()
        },
    }


@click.command(help=__doc__)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--text", type=click.Path(path_type=Path), required=True, help="Python sources to take tasks from.")
@click.option("--agents", default=40, show_default=True)
@click.option("--tasks", default=12, show_default=True)
@click.option("--tokens", default=200, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS / "suffix-decoding.json")
def main(artifact: Path, text: Path, agents: int, tasks: int, tokens: int, rounds: int, output: Path) -> None:
    """Measure, print and write the result."""
    source = text.read_text("utf-8")
    tokenizer = Tokenizer.of_artifact(open_artifact(artifact))
    if tokenizer is None:
        raise click.ClickException(f"{artifact} has no tokenizer")
    turns = [(tokenizer.encode(turn.prompt), tokenizer.encode(turn.output)) for turn in agent_turns(source, agents)]
    results: dict[str, object] = {
        "agents": {
            str(most): {
                LOOKUP: replay(PromptLookup(), turns, most).record(),
                SUFFIX: replay(PromptLookup(OutputHistory(_HISTORY)), turns, most).record(),
            }
            for most in (8, 16, 32)
        }
    }
    click.echo(json.dumps(results["agents"], indent=2))
    starts = [found.start() for found in _FUNCTION.finditer(source)]
    chosen = random.Random(1).sample(starts, tasks)
    prompts = [source[max(0, start - 500) : start + 12] for start in chosen]
    kinds = {
        "again": [SamplingParams(max_tokens=tokens, ignore_eos=True)] * 4,
        "samples": [
            SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.6, seed=seed) for seed in range(8)
        ],
    }
    for name, params in kinds.items():
        results[name] = measure(artifact, prompts, params, rounds)
        click.echo(f"{name}: {json.dumps(results[name])}")
    facts = {"device": device_facts(), "artifact": artifact.name, "tokens": tokens, "rounds": rounds, **results}
    output.write_text(json.dumps(facts, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
