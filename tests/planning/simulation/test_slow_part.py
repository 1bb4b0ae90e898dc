"""The slow part of a simulated pool: the engine's blocks and moves, and steps that wait for the bytes of its link."""

from typing import Any

import pytest

from ingot.artifact import KVGeometry
from ingot.planning.simulation.replica import Replica, serve
from ingot.planning.simulation.simulated_executor import EngineShape, StepRecord
from ingot.planning.simulation.simulated_tiers import CopyLink
from ingot.planning.simulation.stepped_engine import SteppedEngine
from ingot.planning.simulation.timed_request import TimedRequest
from ingot.planning.simulation.traces import RequestLengths
from ingot.runtime import Engine
from tests.conftest import BuildArtifact
from tests.data_paths import DEMO_MODEL
from tests.planning.simulation.engines import KV, LinearTimes, request, shape_of
from tests.planning.simulation.recorded_run import MeasuredTimes, record

_LINK = CopyLink(1e8, 0.0)


def decode_rate(shape: EngineShape, prompt: int, output: int) -> float:
    replica = Replica(shape, LinearTimes())
    (ended,) = serve(replica, [request(0, prompt, output)])
    assert isinstance(replica.engine, SteppedEngine)
    assert ended.completion
    times = ended.completion.metrics
    assert times.first_token_seconds is not None
    return (output - 1) / (times.finish_seconds - times.first_token_seconds)


def test_the_blocks_are_those_of_the_engine(build_unmeasured: BuildArtifact) -> None:
    artifact = build_unmeasured("demo", DEMO_MODEL)
    load = [
        TimedRequest(0.0, RequestLengths(line, prompt, output, blocks), 64)
        for line, prompt, output, blocks in (
            (1, 300, 150, (1, 2, 3, 4, 5)),
            (2, 40, 30, ()),
            (3, 200, 60, (1, 2, 9, 10)),
            (4, 310, 180, (1, 2, 3, 4, 7)),
        )
    ]
    sizes: dict[str, Any] = {"max_batch_tokens": 96, "max_sequences": 1}
    with Engine.load(artifact, kv_blocks=12, kv_offload="200%", kv_offload_to="memory", **sizes) as engine:
        run = record(engine, load)
        real = engine.metrics()
        shape = EngineShape(
            kv=engine._executor.kv_geometry,
            num_blocks=12,
            slow_blocks=24,
            slow_link=CopyLink(float("inf"), 0.0),
            context_tokens=engine.model.context_tokens,
            vocab_size=engine.model.vocab_size,
            **sizes,
        )
    steps: list[StepRecord] = []
    replica = Replica(shape, MeasuredTimes(run.seconds), observe=lambda batch: steps.append(StepRecord.of(batch)))
    assert len(list(serve(replica, load))) == len(load)
    assert steps == run.steps
    assert any(block >= shape.num_blocks for step in steps for row in step.blocks for block in row)
    assert isinstance(replica.engine, SteppedEngine)
    predicted = replica.engine.metrics()
    for name in ("blocks_moved", "prefix_hit_tokens", "blocks_slow", "num_preemptions"):
        assert getattr(real, name) == getattr(predicted, name), name
    assert real.prefix_hit_tokens


def test_a_request_that_the_fast_part_cannot_hold_is_served_at_the_speed_of_the_link() -> None:
    needed = (1600 + 40) // KV.block_tokens
    whole = decode_rate(shape_of(num_blocks=needed + 1, slow_blocks=1, slow_link=_LINK), 1600, 40)
    for num_fast in (90, 50, 10):
        shape = shape_of(num_blocks=num_fast, slow_blocks=200, slow_link=_LINK)
        slow_bytes = (needed - num_fast) * KV.block_bytes
        bound = 1 / (1 / whole + slow_bytes / _LINK.bytes_per_second)
        assert decode_rate(shape, 1600, 40) == pytest.approx(bound, rel=0.03)
    refused = Replica(shape_of(num_blocks=50), LinearTimes()).add(request(0, 1600, 40))
    assert refused
    assert refused.completion is None


def test_a_window_keeps_what_a_step_reads_in_the_fast_part() -> None:
    sizes: dict[str, Any] = {"slow_blocks": 200, "slow_link": _LINK}
    window = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=16, window=64)
    fast = decode_rate(shape_of(kv=window, num_blocks=110, **sizes), 1600, 40)
    assert decode_rate(shape_of(kv=window, num_blocks=20, **sizes), 1600, 40) == pytest.approx(fast, rel=0.02)
    assert decode_rate(shape_of(num_blocks=20, **sizes), 1600, 40) < 0.75 * fast


def test_several_share_the_fast_part_where_the_link_is_slow_and_the_slow_one_where_it_is_fast() -> None:
    def steps(link: CopyLink) -> int:
        replica = Replica(shape_of(num_blocks=40, slow_blocks=200, slow_link=link), LinearTimes())
        ended = list(serve(replica, [request(0, 400, 200, line) for line in range(1, 5)]))
        assert all(each.completion for each in ended)
        return replica.engine.counts.num_steps

    assert steps(CopyLink(1e12, 0.0)) < 0.6 * steps(CopyLink(1e6, 0.0))
