"""Constrained generations on the fake executor, each with a random pair of features; every output is checked.

The fake model has no opinion, so every path that the masks leave open is taken sooner or later, which a real model
would not do. Its logits depend on what the block tables lead to, so a feature that damages a sequence changes its text.
"""

import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf

import jsonschema
from tests.runtime.engines import demo_tokenizer
from tests.simulators.fake_executor import FakeExecutor

from benchmarks.structured.schemas import random_schema
from ingot.errors import RequestError
from ingot.runtime.asking.outputs import Completion
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.constraints import Constraint
from ingot.runtime.constraints.compiler import ConstraintCompiler
from ingot.runtime.engine.engine import Engine
from ingot.runtime.speculation.length_control import LengthControl
from ingot.runtime.speculation.prompt_lookup import PromptLookup
from ingot.runtime.speculation.speculator import Speculator

FEATURES = ("speculation", "choices", "preemption", "prefix-hit", "batch-mates")
PAIRS = tuple(combinations(FEATURES, 2))
_MOST_TOKENS = 240
_BLOCK_TOKENS = 8
_PROMPT = list(range(40, 80))
_MATES = 3
_VALIDATOR = jsonschema.Draft202012Validator  # with its own formats: draft 3 had another "time"


@dataclass(frozen=True)
class Case:
    """One generation: a schema, a seed of sampling, and the features that it runs with."""

    schema: Mapping[str, object]
    seed: int
    features: tuple[str, str]

    @property
    def params(self) -> SamplingParams:
        """White space is unlikely, or most of a random text would be it."""
        return SamplingParams(
            max_tokens=_MOST_TOKENS,
            temperature=1.0,
            seed=self.seed,
            constraint=Constraint.json_schema(self.schema),
            logit_bias=_unlikely(),
            n=3 if "choices" in self.features else 1,
        )


@dataclass
class Outcome:
    """Counts of generations by how they ended."""

    generations: int = 0
    complete: int = 0
    invalid: int = 0
    changed: int = 0
    cut_short: int = 0
    schemas: int = 0
    refused: int = 0
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    accepted_drafts: int = 0

    def as_json(self) -> dict[str, int]:
        """Its counts."""
        return dict(vars(self))


def generate(num_schemas: int, per_schema: int, seed: int = 0, most_seconds: float = inf) -> tuple[Outcome, list[str]]:
    """Generate `per_schema` texts for each schema, and the problems that were found.

    most_seconds   after which no schema is begun; the outcome has the number of those that were
    """
    rng = random.Random(seed)
    outcome, problems = Outcome(), list[str]()
    started = time.monotonic()
    for _ in range(num_schemas):
        if time.monotonic() - started > most_seconds:
            break
        schema = random_schema(rng)
        outcome.schemas += 1
        cases = [Case(schema, rng.randrange(1 << 32), rng.choice(PAIRS)) for _ in range(per_schema)]
        try:
            _run(cases, outcome, problems)
        except RequestError as error:
            outcome.refused += 1
            problems.append(f"{error}: {json.dumps(schema)}")
    return outcome, problems


def _run(cases: Sequence[Case], outcome: Outcome, problems: list[str]) -> None:
    """Run the cases of one schema: plainly, then with their features, those of one pair together."""
    with _engine() as plain:
        for case in cases:
            expected = [plain.generate(_PROMPT, replace(case.params, n=1))]
            found = _with_features(case, outcome)
            for index, choice in enumerate(found.choices):
                if index:
                    expected.append(plain.generate(_PROMPT, replace(case.params, n=1, seed=choice.seed)))
                outcome.generations += 1
                if choice.token_ids != expected[index].token_ids:
                    outcome.changed += 1
                    problems.append(f"{case}: choice {index} has other tokens than alone")
                _check(choice, case, outcome, problems)


def _check(choice: Completion, case: Case, outcome: Outcome, problems: list[str]) -> None:
    if choice.finish_reason != "stop":
        outcome.cut_short += 1
        return
    outcome.complete += 1
    try:
        _VALIDATOR(case.schema, format_checker=_VALIDATOR.FORMAT_CHECKER).validate(json.loads(choice.text))
    except (ValueError, jsonschema.ValidationError) as error:
        outcome.invalid += 1
        problems.append(f"{case}: {choice.text!r} is not valid: {error}")


def _with_features(case: Case, outcome: Outcome) -> Completion:
    """The completion of a case with its pair of features."""
    with _engine(case.features) as engine:
        if "prefix-hit" in case.features:
            engine.generate(_PROMPT, SamplingParams(max_tokens=1))
        crowd = _MATES if {"batch-mates", "preemption"} & {*case.features} else 0
        mates = [replace(case.params, n=1, seed=case.seed + 1 + number) for number in range(crowd)]
        first, *_ = engine.generate([_PROMPT] * (1 + crowd), [case.params, *mates])
        metrics = engine.metrics()
        outcome.preemptions += metrics.num_preemptions
        outcome.prefix_hit_tokens += metrics.prefix_hit_tokens
        outcome.accepted_drafts += metrics.speculation.num_accepted_tokens if metrics.speculation else 0
        return first


def _engine(features: Sequence[str] = ()) -> Engine:
    vocab_size = demo_tokenizer().vocab_size
    longest = -(-(len(_PROMPT) + _MOST_TOKENS) // _BLOCK_TOKENS)
    blocks = longest + 1 if "preemption" in features else 6 * longest
    executor = FakeExecutor(
        vocab_size=vocab_size, num_blocks=blocks, block_tokens=_BLOCK_TOKENS, eos_token_ids=(0,), max_batch_tokens=96
    )
    speculator = None
    if "speculation" in features:
        control = LengthControl(adapts=False)
        speculator = Speculator(PromptLookup(), vocab_size=vocab_size, num_draft_tokens=4, control=control)
    engine = Engine(executor, demo_tokenizer(), prefix_cache="prefix-hit" in features, speculator=speculator)
    engine.constraints = _COMPILER.setdefault("demo", engine.constraints)  # compiles each schema once
    return engine


_COMPILER: dict[str, ConstraintCompiler] = {}
_BIASES: Counter[int] = Counter()


def _unlikely() -> Mapping[int, float]:
    if not _BIASES:
        tokenizer = demo_tokenizer()
        for token in range(tokenizer.vocab_size):
            if (tokenizer.token(token) or "x").strip("\u0120\u010a\u0109\u010d") == "":
                _BIASES[token] = -100
    return _BIASES
