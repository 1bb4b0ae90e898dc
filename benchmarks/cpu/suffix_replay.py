r"""Suffix decoding next to prompt lookup: drafts accepted in a step, tokens per second, and what the index costs.

    INGOT_THREADS=1 python -m benchmarks.cpu.suffix_replay artifacts/demo \
        --text examples/models/stdlib-llama-6m/heldout.txt

Kinds of requests, by one tenant:

    agents   turns of agents that read a file, write a function of it again with an edit, and run the tests; contexts
             are cut, so that what is written again is often in no prompt. The tokens are given, not a model's: counted
             is how many drafts they accept, a step giving them and one more
    rewrites eight at once write the same long text again, each with another name in it and each begun a while after
             the one before. Counted as for agents; next to it the same with finished outputs alone
    again    the same tasks four times, greedily, by the model
    samples  eight samples of each task at temperature 0.6, by the model

By the model, an engine of each kind takes its turn in every round; a ratio is that of two times of one round.
"""

import json
import random
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
_STAGGER = 40  # rounds of a replay between the starts of two requests
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


def rewrites(text: str, count: int) -> Iterator[Turn]:
    """Texts that are long and alike: one after the other of eight names in each of some windows of the text."""
    for place in random.Random(3).sample(range(0, len(text) - 3000, 500), count):
        window = text[place : place + 3000]
        for name in ("this", "node", "state", "owner", "task", "item", "cell", "unit"):
            yield Turn(f"call self {name}\n", window.replace("self", name))


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


@dataclass
class _Running:
    """A request whose output is replayed."""

    request: DraftRequest
    output: Sequence[int]
    place: int = 0


def replay(
    drafter: Drafter, turns: Sequence[tuple[Sequence[int], Sequence[int]]], most: int, at_once: int = 1
) -> Replay:
    """Draft for each output [tokens] after its prompt [tokens], up to `most` in a step; drop what is wrong.

    Of several at once, one begins _STAGGER rounds after the one before.
    """
    num_steps = num_accepted = num_rounds = 0
    drafting = indexing = 0.0
    waiting, running = deque(enumerate(turns)), list[_Running]()
    while waiting or running:
        if waiting and len(running) < at_once and (not running or num_rounds % _STAGGER == 0):
            number, (prompt, output) = waiting.popleft()
            sequence = Tokens.of(number, prompt, len(output) + 1)
            running.append(_Running(DraftRequest(sequence, Sampler(SamplingParams(), sequence.tokens), most), output))
        num_rounds += 1
        begin = time.perf_counter()
        proposals = drafter.propose([each.request for each in running])
        drafting += time.perf_counter() - begin
        for each, (drafts, *_) in zip(running, proposals, strict=True):
            output, right = each.output[each.place :], 0
            while right < min(len(drafts), len(output)) and drafts[right] == output[right]:
                right += 1
            each.request.sequence.tokens.extend(output[: right + 1])
            each.place += right + 1
            num_steps += 1
            num_accepted += right
        for each in running:
            if each.place >= len(each.output):
                begin = time.perf_counter()
                drafter.forget(each.request.sequence)
                indexing += time.perf_counter() - begin
        running = [each for each in running if each.place < len(each.output)]
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
    turns, alike = (
        [(tokenizer.encode(turn.prompt), tokenizer.encode(turn.output)) for turn in found]
        for found in (agent_turns(source, agents), rewrites(source, 8))
    )
    results: dict[str, object] = {
        "agents": {
            str(most): {
                LOOKUP: replay(PromptLookup(), turns, most).record(),
                SUFFIX: replay(PromptLookup(OutputHistory(_HISTORY)), turns, most).record(),
            }
            for most in (8, 16, 32)
        },
        "rewrites": {
            LOOKUP: replay(PromptLookup(), alike, 8, 8).record(),
            "suffix, finished outputs alone": replay(
                PromptLookup(OutputHistory(_HISTORY, 1 << 30)), alike, 8, 8
            ).record(),
            SUFFIX: replay(PromptLookup(OutputHistory(_HISTORY)), alike, 8, 8).record(),
        },
    }
    click.echo(json.dumps(results, indent=2))
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
