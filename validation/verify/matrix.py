"""The matrix: each feature alone, every pair, and every triple that contains speculation, against the plain path."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import reduce
from itertools import combinations

from ingot.errors import UsageError, unknown
from ingot.progress import Stage
from ingot.runtime.engine.engine import Engine
from ingot.validation.verify.compare import apart_difference, beginning_difference, difference
from ingot.validation.verify.features import FEATURES, Feature
from ingot.validation.verify.plan import Observed, Plan
from ingot.validation.verify.requests import (
    MODEL_TEXTS,
    Expected,
    Lengths,
    make_requests,
    model_tokens,
    with_adapters,
    with_constraints,
    with_outputs,
)
from ingot.validation.verify.result import CellResult, VerifyResult
from ingot.validation.verify.scenario import run_plan
from ingot.validation.verify.subject import Subject


@dataclass(frozen=True)
class VerifyOptions:
    """Selection of the features and requests to verify.

    quick  fewer requests with shorter outputs, and no triples
    only   names of cells, as "prefix-hit+preemption"; empty: all
    seed   of the choice of prompts and of sampling
    text   real text for the prompts; None: the model's own samples
    """

    quick: bool = False
    only: tuple[str, ...] = ()
    seed: int = 0
    text: str | None = None


def cell_names(features: Iterable[Feature], quick: bool) -> list[tuple[str, ...]]:
    """All cells: singles, pairs, then triples with speculation unless `quick`."""
    rows = list(features)
    cells: list[tuple[Feature, ...]] = [(row,) for row in rows]
    cells += combinations(rows, 2)
    if not quick:
        cells += [triple for triple in combinations(rows, 3) if any(row.speculates for row in triple)]
    return [tuple(row.name for row in cell) for cell in cells]


def verify(
    subject: Subject, options: VerifyOptions | None = None, command: str = "ingot verify ARTIFACT"
) -> VerifyResult:
    """Run the plain path, then every cell, and compare. `command` begins the command that repeats a cell.

    UsageError for an unknown cell, DataError for a text that is too short, EngineError when the plain path fails.
    """
    options = options or VerifyOptions()
    names = _chosen(options)
    started = time.monotonic()
    expected, source = plain_answers(subject, options)
    stage = Stage("verify", len(names))
    cells = []
    for name in names:
        cells.append(_verify_cell(name, subject, expected, options, command))
        stage.advance()
    return VerifyResult(
        identity=subject.identity,
        name=subject.name,
        target=subject.target,
        engine=subject.engine,
        seed=options.seed,
        quick=options.quick,
        logits=f"within {subject.logits_bound:g} of the row's largest logit" if subject.logits_bound else "bit-equal",
        prompts=source,
        requests={one.request.name: (len(one.request.prompt), len(one.completion.token_ids)) for one in expected},
        features=tuple(FEATURES),
        cells=tuple(cells),
        seconds=round(time.monotonic() - started, 2),
        verified_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def plain_answers(subject: Subject, options: VerifyOptions) -> tuple[list[Expected], str]:
    """Answer every request alone, its prompt in one step, nothing cached; also returns where the prompts came from."""
    lengths = Lengths.of(subject, options.quick)
    size = subject.kv.block_tokens
    blocks = max(-(-subject.model.context_tokens // size), MODEL_TEXTS * (1 + -(-lengths.longest // size)))
    step = max(subject.max_batch_tokens, lengths.large) if subject.raises_batch_tokens else None
    options_of_engine = replace(Plan().options, kv_blocks=blocks, max_batch_tokens=step)
    with subject.load(options_of_engine) as engine:
        tokens, source = _tokens(engine, options, lengths)
        requests = make_requests(tokens, lengths, options.seed, options.quick)
        expected = with_outputs(requests, engine, lengths)
        if not subject.no_adapters:
            expected += with_adapters(expected, engine)
        if not subject.no_constraints:
            expected += with_constraints(expected, engine, lengths)
        return expected, source


def _tokens(engine: Engine, options: VerifyOptions, lengths: Lengths) -> tuple[Sequence[int], str]:
    if options.text is not None and engine.tokenizer is not None:
        return engine.tokenizer.encode(options.text, add_special_tokens=False), "windows of the given text"
    return model_tokens(engine, lengths, options.seed), "windows of text that the model sampled"


def _chosen(options: VerifyOptions) -> list[tuple[str, ...]]:
    if not options.only:
        return cell_names(FEATURES.values(), options.quick)
    return [_parsed(name) for name in options.only]


def _parsed(cell: str) -> tuple[str, ...]:
    """The features of a cell's name, in the order of the table."""
    given = cell.split("+")
    for name in given:
        if name not in FEATURES:
            raise UsageError(f"--only {cell}: {unknown('feature', name, FEATURES, 'features')}")
    return tuple(name for name in FEATURES if name in given)


def _verify_cell(
    names: tuple[str, ...], subject: Subject, expected: Sequence[Expected], options: VerifyOptions, command: str
) -> CellResult:
    features = [FEATURES[name] for name in names]
    reason = _not_available(features, subject)
    if reason:
        return CellResult(features=names, verdict="N/A", reason=reason)
    started = time.monotonic()
    quick = " --quick" if options.quick else ""
    repeat = f"{command}{quick} --only {'+'.join(names)} --seed {options.seed}"
    plan = reduce(lambda made, feature: feature.change(made, subject), features, Plan())
    expected = [one for one in expected if plan.has(one.request)]
    for attempt in plan.attempts:
        exercised, differences = _attempt(attempt, features, subject, expected)
        if differences or all(exercised.values()):
            break
    verdict = "DIFFERS" if differences else "OK" if all(exercised.values()) else "NOT EXERCISED"
    return CellResult(
        features=names,
        verdict=verdict,  # type: ignore[arg-type]  # one of the three
        exercised=exercised,
        differences=tuple(differences),
        repeat=repeat,
        seconds=round(time.monotonic() - started, 3),
    )


def _attempt(
    plan: Plan, features: Sequence[Feature], subject: Subject, expected: Sequence[Expected]
) -> tuple[dict[str, str], list[str]]:
    """Run a plan; returns what shows each feature, and the differences."""
    exercised = {feature.name: "" for feature in features}
    for keep_logits in subject.keeps_logits:
        observed, problem = _run(plan, subject, expected, keep_logits)
        differences = [problem] if problem else _differences(observed, subject.logits_bound)
        if problem:
            return exercised, differences
        exercised = {feature.name: feature.shown_by(observed) for feature in features}
        if differences or not all(exercised.values()):
            return exercised, differences
    return exercised, []


def _not_available(features: Sequence[Feature], subject: Subject) -> str:
    names = {feature.name for feature in features}
    for feature in features:
        reason = feature.unavailable(subject)
        if reason:
            return f"{feature.name}: {reason}"
        clash = sorted(names.intersection(feature.conflicts))
        if clash:
            return f"an engine has {feature.name} or {clash[0]}, not both"
    return ""


def _run(plan: Plan, subject: Subject, expected: Sequence[Expected], keep_logits: bool) -> tuple[Observed, str]:
    """Run a plan; what the engine raises is an answer too, and a wrong one."""
    try:
        return run_plan(plan, subject, expected, keep_logits=keep_logits), ""
    except Exception as error:  # noqa: BLE001 (a crash of the engine fails its cell, and the others are verified)
        return Observed(0), f"the engine failed: {type(error).__name__}: {error}"


def _differences(observed: Observed, bound: float) -> list[str]:
    found = [difference(answer, bound) for answer in (*observed.before, *observed.answers)]
    found += [apart_difference(answer, bound) for answer in observed.apart]
    found += [beginning_difference(answer) for answer in observed.cancelled]
    missing = Counter(observed.asked) - Counter(answer.expected.request.name for answer in observed.answers)
    return [*(str(one) for one in found if one), *(f"request {name}: it was not answered" for name in missing)]
