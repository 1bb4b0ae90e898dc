"""The calibration service: runs an IR step by step on whole sequences, in onnxruntime.

A calibrated pass gets one stage per step: statistics of the inputs of its linear layers, runs of its block with other
weights, and the results that an interrupted build journaled.

The input of a linear layer is made an output of the graph of the step that computes it, and accumulated from there. One
step's weights are in memory at a time, in float32; activations are kept between steps (activations.py). The result
depends only on the data, onnxruntime and numpy. An interrupted build resumes at the stage where it stopped
(journal.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ingot.artifact.programs.expert_choices import ExpertChoices, LayerChoices
from ingot.errors import PassError
from ingot.passes.calibration import Arrays, BlockRun, CalibrationFacts, CalibrationStage, LinearGroup, Trial
from ingot.passes.lowering.expand_experts import COMBINE, DISPATCH, ROUTE
from ingot.passes.model_facts import EXPERT_CHOICES
from ingot.passes.numerics.arrays import Float32Array, Float64Array
from ingot.passes.numerics.experts import Int64Array
from ingot.passes.numerics.linear_algebra import gram_matrix
from ingot.passes.rewriting import static_columns
from ingot.passes.weights import float32_values
from ingot.pipeline.calibrate.activations import MEMORY_BYTES, Activations
from ingot.pipeline.calibrate.coverage import Coverage, CoverageLog, count_choices
from ingot.pipeline.calibrate.data import CalibrationData
from ingot.pipeline.calibrate.divergence import ModelDivergence
from ingot.pipeline.calibrate.journal import BuildJournal, RunJournal
from ingot.pipeline.calibrate.sequences import chunks_of
from ingot.pipeline.calibrate.steps import StepRunner
from ingot.pipeline.calibrate.trials import Trials
from ingot.progress import note

EXPERT_TOKENS = 64
_COVERAGE = "ingot.coverage."  # prefix of the coverage arrays that are recorded with a pass's own


@dataclass
class _EngineStage:
    """Implements passes.calibration.CalibrationStage for step `step_number`.

    place    number of the stage, from 1, among the steps with linear layers, and the number of these steps
    expert_tokens    least tokens of an expert that is calibrated
    """

    step_runner: StepRunner
    step_number: int
    place: tuple[int, int]
    coverage_log: CoverageLog
    trials: Trials
    expert_tokens: int
    is_resumed: bool = False
    is_recorded: bool = False
    _coverage: dict[str, Coverage] = field(default_factory=dict)

    @property
    def groups(self) -> Sequence[LinearGroup]:
        """The step's linear layers."""
        return self.step_runner.steps[self.step_number].groups

    def recorded(self) -> Arrays | None:
        """Load the results of this stage from the journal."""
        journal = self.step_runner.journal
        found = None if journal is None else journal.load(self.place[0])
        if found is None:
            self._note_resumed()
            return None
        self.is_resumed = self.is_recorded = True
        for name in [name for name in found if name.startswith(_COVERAGE)]:
            self.coverage_log.add(Coverage(name.removeprefix(_COVERAGE), *map(int, found[name])))
        return {name: array for name, array in found.items() if not name.startswith(_COVERAGE)}

    def record(self, arrays: Arrays) -> None:
        """Save the results, and the coverage of the layers, to the journal."""
        if self.step_runner.journal is not None:
            coverage = {
                f"{_COVERAGE}{one.layer}": np.array([one.tokens, one.channels, one.zero_channels, one.least_tokens])
                for one in self._coverage.values()
            }
            self.step_runner.journal.save(self.place[0], {**arrays, **coverage})
            self.is_recorded = True

    def tokens(self, source: ir.Value) -> int:
        """Rows of a group's input."""
        return sum(len(x) for x in self._inputs(source))

    def too_few(self, source: ir.Value) -> str:
        """An expert's rows are fewer than all tokens."""
        tokens, data = self.tokens(source), self.step_runner.data.tokens
        if tokens >= min(self.expert_tokens, data):
            return ""
        self._record(Coverage(self._first_reader(source), tokens, _columns(source), 0, self.expert_tokens))
        return f"{tokens:,} calibration tokens reach it, fewer than {self.expert_tokens:,}"

    def gram(self, source: ir.Value) -> Float64Array:
        """X^T X: float32 matmuls within a chunk, float64 sums over chunks. Not finite where the inputs are not."""
        total: Float64Array = np.zeros(())
        with np.errstate(over="ignore", invalid="ignore"):  # the passes refuse what is not finite, with a name
            for x in self._inputs(source):
                total = total + gram_matrix(x).astype(np.float64)
        self._record_coverage(source, np.diagonal(total))
        return total

    def mean_absolute(self, source: ir.Value) -> Float64Array:
        """Mean |x| of each channel."""
        sums = [np.abs(x).sum(axis=0, dtype=np.float64) for x in self._inputs(source)]
        mean: Float64Array = np.sum(sums, axis=0) / self.tokens(source)
        self._record_coverage(source, mean)
        return mean

    def max_absolute(self, source: ir.Value) -> Float64Array:
        """Largest |x| of each channel."""
        peaks = [np.abs(x).max(axis=0, initial=0) for x in self._inputs(source)]
        largest: Float64Array = np.max(peaks, axis=0).astype(np.float64)
        self._record_coverage(source, largest)
        return largest

    def rows(self, source: ir.Value, count: int) -> Float32Array:
        """Evenly spread rows."""
        total = self.tokens(source)
        wanted, taken, start = np.unique(np.linspace(0, total - 1, min(count, total)).astype(np.int64)), [], 0
        for x in self._inputs(source):
            inside = wanted[(wanted >= start) & (wanted < start + len(x))]
            taken.append(x[inside - start])
            start += len(x)
        return np.concatenate(taken)

    def block(self, nodes: Sequence[ir.Node], outputs: Sequence[ir.Value], tokens: int) -> BlockRun:
        """Build a session over the nodes, and choose evenly spread chunks of about this many tokens."""
        steps = self.step_runner
        steps.advance_to(self.step_number)
        runner = steps.graph_runner(nodes, outputs)
        own = {value: float32_values(value) for value in runner.weights}
        feeds = [steps.feeds(runner.activations, chunk) for chunk in steps.spread_chunks(tokens)]

        def run(weights: Mapping[ir.Node, Float32Array]) -> Sequence[Float32Array]:
            replaced = {node.inputs[1]: array for node, array in weights.items()}
            fed = {value: replaced.get(value, array) for value, array in own.items()}
            results = [runner.run(feed, fed) for feed in feeds]
            return [np.concatenate(chunks) for chunks in zip(*results, strict=True)]

        return run

    def divergences(self, trials: Sequence[Trial], tokens: int) -> Sequence[float]:
        """Run each trial from this step to the end."""
        self.step_runner.advance_to(self.step_number)
        return self.trials.on(tokens).divergences(self.step_number, trials)

    def _note_resumed(self) -> None:
        """Report the stage at which an interrupted build resumes."""
        if self.step_runner.journal is not None and self.step_runner.is_resumed and self.place[0] > 1:
            note(f"{self.step_runner.journal.name}: resumed at stage {self.place[0]} of {self.place[1]}")

    def _inputs(self, source: ir.Value) -> Iterator[Float32Array]:
        """Rows of a group's input, chunk by chunk."""
        self.step_runner.advance_to(self.step_number)
        return (self.step_runner.store.get(source.name or "", chunk) for chunk in range(len(self.step_runner.chunks)))

    def _first_reader(self, source: ir.Value) -> str:
        readers = [group.linears[0].name for group in self.groups if group.source is source]
        return (readers or [source.name])[0] or ""

    def _record_coverage(self, source: ir.Value, sizes: Float64Array) -> None:
        """Record how much data reached the layers that read the source."""
        self._record(Coverage.of(self._first_reader(source), self.tokens(source), sizes))

    def _record(self, coverage: Coverage) -> None:
        self._coverage[coverage.layer] = coverage
        self.coverage_log.add(coverage)


@dataclass(frozen=True)
class CalibrationEngine:
    """Implements passes.calibration.Calibration for one set of sequences.

    memory_bytes    limit for activations in memory; the rest goes to a temporary file
    threads         of onnxruntime's process-wide pool; None: the pool as it is, or INGOT_THREADS, or all cores
    journal         results of an interrupted build, and of this one; None to resume nothing
    reference       makes the model from which divergences are measured; None where no pass needs one
    expert_tokens   least tokens of an expert that is calibrated
    """

    data: CalibrationData
    memory_bytes: int = MEMORY_BYTES
    threads: int | None = None
    journal: BuildJournal | None = None
    reference: Callable[[], ir.Model] | None = None
    expert_tokens: int = EXPERT_TOKENS
    _coverage: CoverageLog = field(default_factory=CoverageLog, compare=False, repr=False)

    @property
    def facts(self) -> CalibrationFacts:
        """Facts about the data."""
        return self.data.facts

    def stages(self, model: ir.Model) -> Iterator[CalibrationStage]:
        """Every step that has linear layers; each runs when the inputs of a later one are needed.

        Ends with one warning, with numbers, if too little data reached a layer.
        """
        journal = self.journal.begin_run() if self.journal else None
        with (
            Activations(self.memory_bytes) as store,
            closing(Trials(self._step_runner(model, store, journal))) as trials,
        ):
            steps = trials.step_runner
            numbers = [number for number, step in enumerate(steps.steps) if step.groups]
            for count, number in enumerate(numbers, start=1):
                place = count, len(numbers)
                stage = _EngineStage(steps, number, place, self._coverage, trials, self.expert_tokens)
                yield stage
                steps.is_resumed &= stage.is_resumed
                steps.is_recorded &= stage.is_recorded
            if journal and steps.is_resumed and numbers:
                note(f"{journal.name}: all {len(numbers)} stages were done already")
        self._coverage.warn()

    def logits(self, model: ir.Model) -> Iterator[Float32Array]:
        """The model's logits [tokens, vocab] of all sequences in order, a few whole sequences at a time."""
        with Activations(self.memory_bytes) as store:
            steps = self._step_runner(model, store)
            steps.advance_to(len(steps.steps) - 1)
            yield from (outputs[0] for outputs in steps.outputs(steps.steps[-1].nodes, list(model.graph.outputs)))

    def count_experts(self, model: ir.Model) -> None:
        """Run the model up to its last router, and record on it how often each expert is chosen, if it has experts."""
        layers = dict[str, LayerChoices]()
        with Activations(self.memory_bytes) as store:
            steps = self._step_runner(model, store)
            nodes = ((number, node) for number, step in enumerate(steps.steps) for node in step.nodes)
            for number, node in nodes:
                if node.op_type != ROUTE:
                    continue
                steps.advance_to(number + 1)  # the ids stay until the experts' results are combined
                readers = {reader.op_type: reader for reader in node.outputs[0].consumers()}
                sequences = list(_by_sequence(steps, node.outputs[0]))
                layers[readers[COMBINE].name or ""] = count_choices(sequences, len(readers[DISPATCH].outputs))
        if layers:
            facts, tokens = self.facts, self.data.tokens
            choices = ExpertChoices(text=facts.text, sha256=facts.sha256, tokens=tokens, layers=layers)
            EXPERT_CHOICES.record(model, choices)

    @contextmanager
    def divergence(self, model: ir.Model, wanted: Sequence[ir.Value], batch_tokens: int) -> Iterator[ModelDivergence]:
        """The divergence from `reference`."""
        if self.reference is None:
            raise PassError("the calibration service has no reference model; give CalibrationEngine(reference=...)")
        with Activations(self.memory_bytes) as own, Activations(self.memory_bytes) as others:
            student, reference = self._step_runner(model, own), self._step_runner(self.reference(), others)
            student.chunks = reference.chunks = chunks_of(self.data, batch_tokens)
            yield ModelDivergence(student, reference, wanted)

    def _step_runner(self, model: ir.Model, store: Activations, journal: RunJournal | None = None) -> StepRunner:
        return StepRunner(self.data, model.graph, store, self.threads, self.memory_bytes, journal)


def _by_sequence(steps: StepRunner, ids: ir.Value) -> Iterator[Int64Array]:
    """Rows of a value of the step that ran last, sequence by sequence."""
    for number, chunk in enumerate(steps.chunks):
        yield from np.split(steps.store.get(ids.name or "", number), np.cumsum(chunk.lengths)[:-1])


def _columns(source: ir.Value) -> int:
    columns = static_columns(source)
    assert columns is not None, source.name
    return columns
