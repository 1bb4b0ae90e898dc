"""The benchmark of several processes measures equal tokens of each engine, and the processor time of each process."""

import pytest
from benchmarks.cpu.stage_processes import measure

from tests.conftest import BuildArtifact
from tests.runtime.cpu.native.kernel_cases import needs_library


@needs_library
def test_each_engine_gives_the_same_tokens_and_each_stage_its_processor_time(build_unmeasured: BuildArtifact) -> None:
    found = measure(build_unmeasured("demo"), processes=2, batch=3, tokens=8, rounds=1)
    (turn,) = found["rounds"]
    assert [len(turn[name]["stages"]) for name in ("one", "threads", "stages", "ranks")] == [0, 0, 2, 2]
    assert all(seconds > 0 for name in ("stages", "ranks") for seconds in turn[name]["stages"])
    assert found["ratios"]["stages"] == pytest.approx(turn["stages"]["rate"] / turn["one"]["rate"])
    assert found["ratios"]["processor"] > 0
