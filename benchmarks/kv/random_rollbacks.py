"""Random speculative rollbacks on a model with side state: every answer has the logits of plain decoding, bit for bit.

    python -m benchmarks.kv.random_rollbacks ARTIFACT --output benchmarks/results/kv-random-rollbacks.json

Requests with random prompts and seeded sampling are answered one at a time by plain decoding, and then together, with
drafts that are the right tokens, each replaced by another with a probability that changes from round to round. Where
one is rejected the state returns to the copy that was made before the step. The exit code is 1 at the first difference,
which is named with the round's number; `--seed` and the number repeat it.
"""

import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click
from tests.simulators.fake_drafters import KnowingDrafter

from benchmarks.device import device_facts
from ingot.artifact import Artifact, open_artifact
from ingot.runtime import Completion, Engine, SamplingParams
from ingot.runtime.executors import load_executor
from ingot.runtime.options import EngineOptions
from ingot.runtime.speculation.length_control import LengthControl
from ingot.runtime.speculation.speculator import Speculator

_REQUESTS = 16  # of a round
_MOST_PROMPT = 96  # tokens
_MOST_TOKENS = 48
_MOST_DRAFTS = 6
_ERROR_RATES = (0.1, 0.3, 0.6, 1.0)
_OPTIONS = EngineOptions(kv_blocks=512, max_batch_tokens=128, max_sequences=8)


@dataclass(frozen=True)
class Rollbacks:
    """Counts of one round: rejected drafts, and tokens of answers that were compared."""

    rejected: int
    tokens: int


class Difference(Exception):
    """An answer that is not the one of plain decoding, and where."""


def run_round(artifact: Artifact, seed: int, number: int) -> Rollbacks:
    """Answer random requests twice, and compare. Raises Difference."""
    rng = random.Random(f"{seed},{number}")
    vocabulary = artifact.manifest.model.vocab_size
    prompts = [[rng.randrange(vocabulary) for _ in range(rng.randrange(1, _MOST_PROMPT))] for _ in range(_REQUESTS)]
    params = [
        SamplingParams(max_tokens=rng.randrange(8, _MOST_TOKENS), temperature=1.0, seed=rng.randrange(2**31))
        for _ in prompts
    ]
    with Engine(load_executor(artifact, _OPTIONS), prefix_cache=False) as plain:
        expected = [plain.generate(prompt, one, keep_logits=True) for prompt, one in zip(prompts, params, strict=True)]
    tokens = {tuple(prompt): answer.token_ids for prompt, answer in zip(prompts, expected, strict=True)}
    drafter = KnowingDrafter(lambda prompt, _: tokens[prompt], vocabulary, rng.choice(_ERROR_RATES), rng.randrange(99))
    speculator = Speculator(
        drafter, vocab_size=vocabulary, num_draft_tokens=_MOST_DRAFTS, control=LengthControl(adapts=False)
    )
    with Engine(load_executor(artifact, _OPTIONS), speculator=speculator) as engine:
        found = engine.generate(prompts, params, keep_logits=True)
        engine.check()
        counts = engine.metrics().speculation
    for request, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if not _are_equal(ours, theirs):
            raise Difference(
                f"seed {seed}, round {number}: the answer of request {request} is not that of plain decoding"
            )
    assert counts is not None
    return Rollbacks(counts.num_tested_tokens - counts.num_accepted_tokens, sum(len(one.token_ids) for one in found))


def _are_equal(ours: Completion, theirs: Completion) -> bool:
    assert ours.logits is not None
    assert theirs.logits is not None
    return ours.token_ids == theirs.token_ids and ours.logits.tobytes() == theirs.logits.tobytes()


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path, exists=True))
@click.option("--rollbacks", default=100_000, help="Rejected drafts to reach.")
@click.option("--seed", default=0)
@click.option("--output", type=click.Path(path_type=Path))
def main(artifact: Path, rollbacks: int, seed: int, output: Path | None) -> None:
    """Run rounds until so many drafts were rejected."""
    opened, started = open_artifact(artifact), time.monotonic()
    rejected = tokens = number = 0
    while rejected < rollbacks:
        try:
            done = run_round(opened, seed, number)
        except Difference as error:
            print(error)
            sys.exit(1)
        rejected, tokens, number = rejected + done.rejected, tokens + done.tokens, number + 1
        if number % 20 == 0:
            print(f"{rejected:,} rollbacks, {tokens:,} tokens equal, {time.monotonic() - started:.0f} s", flush=True)
    result = {
        "artifact": opened.manifest.name,
        "engine": opened.manifest.engine,
        "seed": seed,
        "rounds": number,
        "rollbacks": rejected,
        "equal_tokens": tokens,
        "seconds": round(time.monotonic() - started, 1),
        "device": device_facts(),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
