"""The calibration service: walks an IR level by level on whole sequences, in onnxruntime.

Observers are ordinary graph outputs: what a linear layer reads leaves its level as an output of that level's graph, and
is summed up from there. One level's weights are in memory at a time, in float32; activations are kept between levels
(activations.py). The result depends on the data, on onnxruntime and on numpy, not on chance; a build that was cut off
goes on where it stopped (journal.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.calibration import CalibrationFacts, CalibrationStage, Float32Array
from ingot.pipeline.calibrate.activations import MEMORY_BYTES, Activations
from ingot.pipeline.calibrate.data import CalibrationData
from ingot.pipeline.calibrate.data_checks import ReachLog
from ingot.pipeline.calibrate.divergence import Divergence
from ingot.pipeline.calibrate.journal import BuildJournal, WalkJournal
from ingot.pipeline.calibrate.sequences import chunks_of
from ingot.pipeline.calibrate.stage import Stage, Trials
from ingot.pipeline.calibrate.walk import Walk
from ingot.progress import note


@dataclass(frozen=True)
class CalibrationEngine:
    """Implements passes.calibration.Calibration for one set of sequences.

    memory_bytes    activations that are kept in memory; the others go to a temporary folder on disk
    threads         of onnxruntime's process-wide pool; None takes it as it is, else INGOT_THREADS or all cores
    journal         what earlier builds have done already, and this one does; None to do everything anew
    reference       makes the model that divergences are measured from; None where nobody asks for one
    """

    data: CalibrationData
    memory_bytes: int = MEMORY_BYTES
    threads: int | None = None
    journal: BuildJournal | None = None
    reference: Callable[[], ir.Model] | None = None
    _reach: ReachLog = field(default_factory=ReachLog, compare=False, repr=False)

    @property
    def facts(self) -> CalibrationFacts:
        """What the data is."""
        return self.data.facts

    def stages(self, model: ir.Model) -> Iterator[CalibrationStage]:
        """Every level that begins with linear layers; each is run when a later one's inputs are asked for.

        At the end there is one warning, with numbers, where too little data reached a layer.
        """
        journal = self.journal.begin_walk() if self.journal else None
        with (
            Activations(self.memory_bytes) as store,
            closing(Trials(self._walk(model, store, journal))) as trials,
        ):
            walk = trials.walk
            numbers = [number for number, level in enumerate(walk.levels) if level.groups]
            for count, number in enumerate(numbers):
                stage = Stage(walk, number, (count + 1, len(numbers)), self._reach, trials)
                yield stage
                walk.is_recalled &= stage.is_recalled
                walk.is_kept &= stage.is_kept
            if journal and walk.is_recalled and numbers:
                note(f"{journal.name}: all {len(numbers)} stages were done already")
        self._reach.warn()

    def logits(self, model: ir.Model) -> Iterator[Float32Array]:
        """The model's logits [tokens, vocab] of all sequences in order, a few whole sequences at a time."""
        with Activations(self.memory_bytes) as store:
            walk = self._walk(model, store)
            walk.reach(len(walk.levels) - 1)
            yield from (outputs[0] for outputs in walk.outputs(walk.levels[-1].nodes, list(model.graph.outputs)))

    @contextmanager
    def divergence(self, model: ir.Model, wanted: Sequence[ir.Value], batch_tokens: int) -> Iterator[Divergence]:
        """The divergence from `reference`."""
        if self.reference is None:
            raise PassError("the calibration service was given no reference model; CalibrationEngine(reference=...)")
        with Activations(self.memory_bytes) as own, Activations(self.memory_bytes) as others:
            student, reference = self._walk(model, own), self._walk(self.reference(), others)
            student.chunks = reference.chunks = chunks_of(self.data, batch_tokens)
            yield Divergence(student, reference, wanted)

    def _walk(self, model: ir.Model, store: Activations, journal: WalkJournal | None = None) -> Walk:
        return Walk(self.data, model.graph, store, self.threads, self.memory_bytes, journal)
