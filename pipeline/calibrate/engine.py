"""The calibration service: runs an IR step by step on whole sequences, in onnxruntime.

The input of a linear layer is made an output of the graph of the step that computes it, and accumulated from there. One
step's weights are in memory at a time, in float32; activations are kept between steps (activations.py). The result
depends only on the data, onnxruntime and numpy. An interrupted build resumes at the stage where it stopped
(journal.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.calibration import CalibrationFacts, CalibrationStage
from ingot.passes.numerics.arrays import Float32Array
from ingot.pipeline.calibrate.activations import MEMORY_BYTES, Activations
from ingot.pipeline.calibrate.coverage import CoverageLog
from ingot.pipeline.calibrate.data import CalibrationData
from ingot.pipeline.calibrate.divergence import Divergence
from ingot.pipeline.calibrate.journal import BuildJournal, RunJournal
from ingot.pipeline.calibrate.sequences import chunks_of
from ingot.pipeline.calibrate.stage import Stage
from ingot.pipeline.calibrate.steps import StepRunner
from ingot.pipeline.calibrate.trials import Trials
from ingot.progress import note


@dataclass(frozen=True)
class CalibrationEngine:
    """Implements passes.calibration.Calibration for one set of sequences.

    memory_bytes    limit for activations in memory; the rest goes to a temporary file
    threads         of onnxruntime's process-wide pool; None: the pool as it is, or INGOT_THREADS, or all cores
    journal         results of an interrupted build, and of this one; None to resume nothing
    reference       makes the model from which divergences are measured; None where no pass needs one
    """

    data: CalibrationData
    memory_bytes: int = MEMORY_BYTES
    threads: int | None = None
    journal: BuildJournal | None = None
    reference: Callable[[], ir.Model] | None = None
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
                stage = Stage(steps, number, (count, len(numbers)), self._coverage, trials)
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

    @contextmanager
    def divergence(self, model: ir.Model, wanted: Sequence[ir.Value], batch_tokens: int) -> Iterator[Divergence]:
        """The divergence from `reference`."""
        if self.reference is None:
            raise PassError("the calibration service has no reference model; give CalibrationEngine(reference=...)")
        with Activations(self.memory_bytes) as own, Activations(self.memory_bytes) as others:
            student, reference = self._step_runner(model, own), self._step_runner(self.reference(), others)
            student.chunks = reference.chunks = chunks_of(self.data, batch_tokens)
            yield Divergence(student, reference, wanted)

    def _step_runner(self, model: ir.Model, store: Activations, journal: RunJournal | None = None) -> StepRunner:
        return StepRunner(self.data, model.graph, store, self.threads, self.memory_bytes, journal)
