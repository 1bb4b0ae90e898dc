"""Fed with the measured times of steps, a simulation makes the batches of the engine: rows, chunks, blocks, hits."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.artifact import Artifact
from ingot.planning.simulation.replica import Replica, TimedRequest, serve
from ingot.planning.simulation.simulated_executor import EngineShape, StepRecord
from ingot.planning.simulation.stepped_engine import SteppedEngine
from ingot.planning.simulation.traffic import parse_traffic
from ingot.runtime import Engine
from tests.conftest import BuildArtifact
from tests.data_paths import DEMO_MODEL, shared_data
from tests.planning.simulation.recorded_run import MeasuredTimes, RecordedRun, record

LIMITS: dict[str, Any] = {"kv_blocks": 60, "kv_offload": "off", "max_batch_tokens": 96, "max_sequences": 12}


@pytest.fixture(scope="module")
def artifact(build_unmeasured: BuildArtifact) -> Artifact:
    return build_unmeasured("demo", DEMO_MODEL)


def slice_of(path: Path, count: int, scale: float, longer: int, speed: float) -> list[TimedRequest]:
    """Requests of a trace in the model's size; outputs are made longer, so that sequences outgrow their blocks."""
    found = []
    for each in parse_traffic(str(path), count=count, context_tokens=500, scale=scale, speed=speed):
        outputs = min(each.lengths.output_tokens * longer, 400)
        found.append(replace(each, lengths=replace(each.lengths, output_tokens=outputs)))
    return found


def simulated(run: RecordedRun, load: Sequence[TimedRequest], engine: Engine) -> tuple[list[StepRecord], Replica]:
    shape = EngineShape(
        kv=engine._executor.kv_geometry,
        num_blocks=LIMITS["kv_blocks"],
        max_batch_tokens=LIMITS["max_batch_tokens"],
        max_sequences=LIMITS["max_sequences"],
        context_tokens=engine.model.context_tokens,
        vocab_size=engine.model.vocab_size,
    )
    steps: list[StepRecord] = []
    replica = Replica(shape, MeasuredTimes(run.seconds), observe=lambda batch: steps.append(StepRecord.of(batch)))
    done = list(serve(replica, load))
    assert len(done) == len(load)
    return steps, replica


@pytest.mark.parametrize(
    ("trace", "count", "scale", "longer", "speed"),
    [("azure2023-code.csv", 100, 1 / 32, 40, 100.0), ("conversation_trace.jsonl", 80, 1 / 64, 12, 100.0)],
)
def test_the_batches_are_those_of_the_engine(
    artifact: Artifact, trace: str, count: int, scale: float, longer: int, speed: float
) -> None:
    load = slice_of(shared_data(f"traces/{trace}"), count, scale, longer, speed)
    with Engine.load(artifact, **LIMITS) as engine:
        run = record(engine, load)
        steps, replica = simulated(run, load, engine)
        assert isinstance(replica.engine, SteppedEngine)
        real, predicted = engine.metrics(), replica.engine.metrics()
    differing = [index for index, (each, other) in enumerate(zip(run.steps, steps, strict=False)) if each != other]
    assert not differing, f"step {differing[0]} of {len(steps)}: {run.steps[differing[0]]} {steps[differing[0]]}"
    assert len(steps) == len(run.steps) > 100
    for name in ("num_preemptions", "prefix_hit_tokens", "num_batch_full", "num_pool_full", "computed_tokens"):
        assert getattr(real, name) == getattr(predicted, name), name
    assert real.num_preemptions, "the slice preempts nothing, and so shows too little"
    assert any(count > 1 for step in steps for count in step.num_tokens)
    if "conversation" in trace:
        assert real.prefix_hit_tokens
