"""Predicts what a build will measure: size, latency and peak memory, each with an interval and a source.

The size follows from the recipe and the checkpoint before anything is compiled. Latency is predicted when the artifact
can be run: a few steps of its engine are timed, a step model is fitted to them, and the closed loop of the measurement
runs in virtual time, with the engine's own scheduler. Accuracy is not predicted.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median, stdev

from ingot.artifact import Artifact, open_artifact
from ingot.artifact.programs.cpu_program_checks import read_operations
from ingot.errors import EngineError, IngotError
from ingot.passes.quantization.mixed_precision import MixedPrecision
from ingot.pipeline.model.importer import ModelSource
from ingot.pipeline.planned_program import plan_program
from ingot.pipeline.recipe.schema import Recipe
from ingot.planning.fitting import MeasuredStep, fit_steps
from ingot.planning.serving_rows import TERMS, expert_term
from ingot.planning.simulation.simulated_executor import EngineShape, StepPredictor, VirtualClock
from ingot.planning.simulation.stepped_engine import SteppedEngine
from ingot.planning.step_model import StepModel, StepShape
from ingot.runtime import Engine, EngineOptions, SamplingParams
from ingot.validation.evidence import MeasureOptions
from ingot.validation.latency.measurement import RequestRecord, closed_loop, garbage_collection_paused, prompts
from ingot.validation.memory import probe_imports
from ingot.validation.options import LatencyLoad, MemoryOptions
from ingot.validation.prediction import PredictedFigure, Prediction
from ingot.validation.subject import EngineSubject, StepEvent

Clock = Callable[[], float]

_EXACT_ENGINES, _NEAR_ENGINES = ("native", "onnxruntime"), ("cuda",)
_PADDING = 0.01
"""Share of the bytes of a GPU program's weights that the planned sizes leave out."""
_BUDGET = 0.005
"""Share by which mixed-precision may miss its budget with assumed losses."""
_LEAST_REPEATS, _MOST_REPEATS = 2, 20
_DEVIATIONS = 2.0
_SECONDS = 1.0
"""Seconds for more repeats than the least: the steps of small models are short, and other processes disturb them."""
_OUTPUT_TOKENS = 9
_FLOAT_BYTES = 4
_SLOTS = 4
"""Slots of side state for each sequence: its own, and states that are kept for prefixes."""
_LOADED_BYTES = 7_500_000
"""Of a process that has loaded a native program and generated: what grows with no size of the artifact."""
_TOKENIZER_FACTOR = 18.0
"""Bytes of a loaded tokenizer for each byte of its files; 16 to 22 where it was measured."""
_MEMORY_ERROR = 0.08
"""More than twice the largest error on native artifacts of 4 to 642 MB, which is 2.5 %."""


@dataclass
class Predictor:
    """Collects the figures of one build.

    imported   peak bytes of a process that has imported the runtime, which runs while the program is compiled
    """

    figures: dict[str, PredictedFigure] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    experts: tuple[int, int] = (0, 0)
    imported: Future[int] | None = None

    @classmethod
    def of_size(cls, recipe: Recipe, source: ModelSource) -> "Predictor":
        """Begin with the size, before anything is compiled."""
        predictor = cls()
        predictor._add_size(recipe, source)
        return predictor

    def predict(self, artifact: Path, options: MeasureOptions) -> Prediction:
        """Add latency and peak memory of an artifact that this machine can run."""
        opened = open_artifact(artifact, verify=False)
        if options.memory:
            self._add_memory(opened, options.memory)
        if options.latency:
            try:
                self._add_latency(opened, options.latency, options.num_threads)
            except IngotError as error:
                self.left_out.append(f"latency: {error}")
        made_at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return Prediction(made_at=made_at, figures=self.figures, left_out=tuple(self.left_out))

    def _add_size(self, recipe: Recipe, source: ModelSource) -> None:
        try:
            program = plan_program(recipe, source)
        except IngotError as error:
            self.left_out.append(f"weight_bytes: {error}")
            return
        self.experts = program.shape.experts
        engine, size = program.target.engine, float(program.memory.weight_bytes)
        if engine == "native" and recipe.memory:
            with_one_thread = ThreadPoolExecutor(1)
            self.imported = with_one_thread.submit(probe_imports)
            with_one_thread.shutdown(wait=False)
        if engine not in _EXACT_ENGINES + _NEAR_ENGINES:
            self.left_out.append(f"weight_bytes: the weights are in plans of {engine}")
            return
        share = _PADDING if engine in _NEAR_ENGINES else 0.0
        share += _BUDGET * any(isinstance(made, MixedPrecision) for made in recipe.make_passes())
        words = f"the program that the recipe makes for {program.target.name}, lowered without weights"
        self.figures["weight_bytes"] = _figure(size, share, words)

    def _add_memory(self, artifact: Artifact, options: MemoryOptions) -> None:
        if artifact.manifest.engine != "native":
            self.left_out.append(f"peak_memory_bytes: memory of the engine {artifact.manifest.engine} is not modelled")
            return
        try:
            imported = self.imported.result() if self.imported else probe_imports()
        except IngotError as error:
            self.left_out.append(f"peak_memory_bytes: {error}")
            return
        size = imported + native_bytes(artifact, options)
        words = "imports of the runtime, measured in a process; program, arena, KV and tokenizer by their sizes"
        self.figures["peak_memory_bytes"] = _figure(size, _MEMORY_ERROR, words)

    def _add_latency(self, artifact: Artifact, load: LatencyLoad, num_threads: int | None) -> None:
        kv = artifact.manifest.kv
        blocks = max(load.concurrency) * -(-load.sequence_tokens // kv.block_tokens) + 2
        slots = _SLOTS * max(load.concurrency) if kv.state_bytes else None
        options = EngineOptions(kv_blocks=2 * blocks, prefix_cache=False, num_threads=num_threads, state_slots=slots)
        with Engine.load(artifact, **vars(options)) as engine:
            shape = EngineShape(
                kv=kv,
                num_blocks=2 * blocks,
                num_states=slots or 0,
                max_batch_tokens=engine.max_batch_tokens,
                max_sequences=max(load.concurrency),
                context_tokens=engine.model.context_tokens,
                vocab_size=engine.model.vocab_size,
            )
            with garbage_collection_paused():
                steps = timed_steps(engine, shape, load)
        self.figures |= latency_figures(fit(steps, self.experts), shape, load)


def native_bytes(artifact: Artifact, options: MemoryOptions) -> float:
    """Bytes that a process adds to its imports when it loads a native program and generates."""
    manifest = artifact.manifest
    tokenizer = sum(entry.bytes for name, entry in manifest.files.items() if name.startswith("tokenizer/"))
    arena = read_operations(artifact).arena_floats * _FLOAT_BYTES * options.prompt_tokens
    blocks = -(-(options.prompt_tokens + options.output_tokens) // manifest.kv.block_tokens)
    kv = blocks * manifest.kv.block_bytes + manifest.kv.state_bytes
    return _LOADED_BYTES + manifest.program_bytes + arena + kv + _TOKENIZER_FACTOR * tokenizer


@dataclass(frozen=True)
class TimedStep:
    """A step that was repeated, and the seconds of each time."""

    step: StepShape
    seconds: tuple[float, ...]

    @property
    def measured(self) -> MeasuredStep:
        """The step with its typical seconds: of decoding the mean, as in a request's time per output token."""
        typical = median(self.seconds) if self.step.prefill_tokens else fmean(self.seconds)
        return MeasuredStep(self.step, typical)

    @property
    def spread(self) -> float:
        """The standard deviation of the seconds as a share of their mean."""
        return stdev(self.seconds) / fmean(self.seconds)


def fit(steps: Sequence[TimedStep], experts: tuple[int, int]) -> StepModel:
    """Fit the terms of a step to timed steps; `experts` of a layer and of a token, 0, 0 for a dense model.

    The interval covers the residuals of the fit, and the spread of a step that is repeated: on a busy machine, the
    measurement runs at other moments than these steps.
    """
    terms = (*TERMS, expert_term(*experts)) if experts[0] else TERMS
    source = f"{len(steps)} kinds of steps of the artifact, each {len(steps[0].seconds)} times, on this machine"
    model = fit_steps(terms, [one.measured for one in steps], source)
    spread = median(one.spread for one in steps)
    return replace(model, relative_error=math.hypot(model.relative_error, _DEVIATIONS * spread))


def timed_steps(
    engine: Engine, shape: EngineShape, load: LatencyLoad, clock: Clock = time.perf_counter
) -> list[TimedStep]:
    """Time steps of an idle engine that serves one request, and as many as the load has in flight."""
    most = max(load.concurrency)
    runs = dict.fromkeys([(1, max(1, load.prompt_tokens // 2)), (1, load.prompt_tokens), (most, load.prompt_tokens)])
    output_tokens = min(load.output_tokens, _OUTPUT_TOKENS)
    _times(engine, shape, [_prompt(shape, 0, load.prompt_tokens)], output_tokens, clock)
    found: dict[tuple[tuple[int, int], int], list[MeasuredStep]] = {}
    begin = clock()
    for repeat in range(_MOST_REPEATS):
        if repeat >= _LEAST_REPEATS and clock() - begin > _SECONDS:
            break
        for run in runs:
            rows, prompt_tokens = run
            given = [_prompt(shape, 1 + repeat * most + row, prompt_tokens) for row in range(rows)]
            for place, one in enumerate(_summarized(_times(engine, shape, given, output_tokens, clock))):
                found.setdefault((run, place), []).append(one)
    return [TimedStep(each[0].step, tuple(one.seconds for one in each)) for each in found.values()]


def _prompt(shape: EngineShape, number: int, num_tokens: int) -> list[int]:
    return [(number * 104_729 + place * 7_919) % shape.vocab_size for place in range(num_tokens)]


def _times(
    engine: Engine, shape: EngineShape, given: Sequence[Sequence[int]], output_tokens: int, clock: Clock
) -> list[MeasuredStep]:
    """Serve requests by the engine and by a simulated one in lockstep, which says what is in each step.

    EngineError for an engine that makes another number of steps.
    """
    simulated = SimulatedSubject(shape, _Untimed())
    subject, shapes, seconds = EngineSubject(engine), list[StepShape](), list[float]()
    for prompt in given:
        subject.submit(prompt, output_tokens)
        simulated.submit(prompt, output_tokens)
    while engine.has_unfinished():
        begin = clock()
        subject.step()
        seconds.append(clock() - begin)
    while simulated.engine.has_unfinished():
        simulated.step()
        shapes.append(simulated.engine.executor.last)
    if len(shapes) != len(seconds):
        raise EngineError(
            f"the engine makes {len(seconds)} steps where the simulated one makes {len(shapes)}, so what is in each is"
            " unknown"
        )
    return [MeasuredStep(step, each) for step, each in zip(shapes, seconds, strict=True)]


def _summarized(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    decodes = [one for one in steps if not one.step.prefill_tokens]
    others = [one for one in steps if one.step.prefill_tokens]
    if not decodes:
        return others
    return [*others, MeasuredStep(_mean([one.step for one in decodes]), fmean(one.seconds for one in decodes))]


def _mean(shapes: Sequence[StepShape]) -> StepShape:
    names = ("prefill_tokens", "prefill_context_tokens", "decode_rows", "context_tokens", "num_sequences")
    return StepShape(**{name: sum(getattr(shape, name) for shape in shapes) / len(shapes) for name in names})


class _Untimed:
    """Predicts no time. Implements `StepPredictor`."""

    def seconds(self, step: StepShape) -> float:
        """Return 0."""
        return 0.0


class SimulatedSubject:
    """Serves requests in virtual time, by the engine's own scheduler. Implements `LatencySubject`."""

    def __init__(self, shape: EngineShape, times: StepPredictor) -> None:
        self.clock = VirtualClock()
        self.engine = SteppedEngine(shape, times, EngineOptions(prefix_cache=False), self.clock)
        self.vocab_size, self.context_tokens = shape.vocab_size, shape.context_tokens

    def submit(self, prompt: Sequence[int], output_tokens: int) -> int:
        """Queue a request."""
        return self.engine.add(list(prompt), SamplingParams(max_tokens=output_tokens, ignore_eos=True))

    def step(self) -> list[StepEvent]:
        """Make one step, which advances the clock."""
        return [StepEvent(one.request_id, len(one.tokens), one.finished) for one in self.engine.step()]


def latency_figures(model: StepModel, shape: EngineShape, load: LatencyLoad) -> dict[str, PredictedFigure]:
    """Run the load's closed loop in virtual time; return TTFT, TPOT and throughput at each concurrency."""
    found: dict[str, PredictedFigure] = {}
    for level in load.concurrency:
        subject = SimulatedSubject(shape, model)
        requests = prompts(load, shape.vocab_size, 0, level)
        records = closed_loop(subject, requests, load.output_tokens, level, subject.clock)
        for name, value in _medians(records).items():
            words = f"{model.source}; the load in virtual time"
            found[f"{name}@{level}"] = _figure(value, model.relative_error, words)
    return found


def _medians(records: Sequence[RequestRecord]) -> Mapping[str, float]:
    tokens, seconds = sum(len(one.token_seconds) for one in records), max(one.token_seconds[-1] for one in records)
    return {
        "ttft_seconds": median(one.ttft for one in records),
        "tpot_seconds": median(one.tpot for one in records),
        "tokens_per_second": tokens / seconds,
    }


def _figure(value: float, error: float, source: str) -> PredictedFigure:
    """A figure whose 95 % interval is a factor of 1 + error both ways, for times and for rates alike."""
    return PredictedFigure(value=value, low=value / (1 + error), high=value * (1 + error), source=source)
