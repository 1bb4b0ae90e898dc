"""What engineers know of serving comes out of the simulation: seven experiments, on data sheets of real GPUs.

Each holds over a range of settings, which its parameters span; where it ends is said next to it.
"""

from dataclasses import replace
from typing import Any

import pytest

from ingot.errors import UsageError
from ingot.planning.hardware import find_hardware
from ingot.planning.model_shape import ModelShape
from ingot.planning.roofline import data_sheet
from ingot.planning.simulation.deployment import Deployment, capacity, knee, sweep
from ingot.planning.simulation.figures import Figures, parse_service_level
from ingot.planning.simulation.simulated_executor import EngineShape
from ingot.planning.simulation.traffic import RequestSizes, parse_traffic
from ingot.runtime.options import EngineOptions
from tests.planning.simulation.engines import seven_billion, seventy_billion

LEVEL = parse_service_level("ttft=1.0,tpot=0.1,percentile=0.9")


def deployment(
    model: ModelShape, hardware: str = "a100", devices: int = 1, acceptance: tuple[float, ...] = (), **options: Any
) -> Deployment:
    device = find_hardware(hardware)
    num_blocks = int((device.memory * devices * 0.9 - model.matmul_bytes) // model.kv.block_bytes)
    max_sequences = options.get("max_sequences") or 64
    shape = EngineShape(
        kv=model.kv,
        num_blocks=num_blocks,
        max_batch_tokens=options.get("max_batch_tokens") or 2048,
        max_sequences=max_sequences,
        context_tokens=model.context_tokens,
        acceptance=acceptance,
    )
    times = data_sheet(model, device, tensor_parallel=devices)
    return Deployment(shape=shape, times=times, options=EngineOptions(**options))


def run(engines: Deployment, load: str, count: int = 300, seed: int = 0, **sizes: int) -> Figures:
    given = RequestSizes(**{"prompt_tokens": 256, "output_tokens": 128, **sizes})
    return engines.run(parse_traffic(load, sizes=given, count=count, context_tokens=4096, seed=seed), LEVEL)


# At 6 a second static batches keep up with some seeds; at 20 continuous ones are overloaded too.
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("rate", [8, 10, 14])
def test_static_batches_are_overloaded_where_continuous_ones_keep_up(rate: int, seed: int) -> None:
    assert run(deployment(seven_billion(), batching="static"), f"poisson:{rate}", 400, seed).is_saturated
    assert not run(deployment(seven_billion()), f"poisson:{rate}", 400, seed).is_saturated


# Of few requests the last batch is a large part, in which both engines wait for the longest output.
@pytest.mark.parametrize(("count", "seed", "gain"), [(1000, 0, 2.0), (200, 0, 1.7), (200, 1, 1.7)])
def test_continuous_batches_are_twice_as_fast_when_all_arrive_at_once(count: int, seed: int, gain: float) -> None:
    static, continuous = (
        run(deployment(seven_billion(), batching=batching), "at-once", count, seed)
        for batching in ("static", "continuous")
    )
    assert continuous.output_tokens_per_second >= gain * static.output_tokens_per_second


@pytest.mark.parametrize("shared", [1000, 2000, 3000])
@pytest.mark.parametrize("rate", [1, 2, 4])
def test_a_prefix_cache_halves_the_time_to_the_first_token_of_prompts_that_share_most(rate: int, shared: int) -> None:
    sizes = {"prompt_tokens": 100, "shared_tokens": shared, "output_tokens": 32}
    without = run(deployment(seven_billion(), prefix_cache=False), f"poisson:{rate}", 150, **sizes)
    cached = run(deployment(seven_billion()), f"poisson:{rate}", 150, **sizes)
    assert cached.cached_share > 0.85
    assert cached.ttft.p50 <= without.ttft.p50 / 2


@pytest.mark.parametrize("drafts", [(0.7, 0.6, 0.5, 0.4), (0.8, 0.7, 0.6, 0.5), (0.6, 0.5)])
def test_speculation_shortens_tokens_of_small_batches_and_not_of_large_ones(drafts: tuple[float, ...]) -> None:
    gains = {}
    for size in (1, 64):
        plain, drafted = (
            run(deployment(seventy_billion(8), "h100", 2, acceptance, max_sequences=size), "at-once", 2 * size)
            for acceptance in ((), drafts)
        )
        gains[size] = plain.tpot.mean / drafted.tpot.mean
    assert gains[1] > 1.4
    assert gains[64] < 0.75 * gains[1]
    assert gains[64] < 1.1


@pytest.mark.parametrize("hardware", ["a100", "h100", "h200"])
def test_more_devices_serve_more_and_less_than_in_proportion(hardware: str) -> None:
    throughput = [
        run(deployment(seven_billion(), hardware, devices), "at-once").output_tokens_per_second for devices in (1, 4, 8)
    ]
    one, four, eight = throughput
    assert one < four < eight
    assert four < 4 * one
    assert eight < 8 * one


@pytest.mark.parametrize(("max_sequences", "output_tokens"), [(4, 32), (8, 64), (16, 128)])
def test_a_saturation_rate_is_found_and_above_it_the_queue_has_no_bound(max_sequences: int, output_tokens: int) -> None:
    engines = deployment(seven_billion(), max_sequences=max_sequences)
    sizes = RequestSizes(prompt_tokens=256, output_tokens=output_tokens)
    traffic = parse_traffic("poisson:4", sizes=sizes, count=250, context_tokens=4096)
    exact = replace(engines, times=replace(engines.times, relative_error=0.0))  # type: ignore[type-var]
    found = capacity(exact, traffic, LEVEL)
    assert 0 < found.low < found.high <= found.low * 1.021
    assert (found.least, found.most) == (found.low, found.high)
    below, above = sweep(exact, traffic, LEVEL, [0.6 * found.low, 2 * found.high])
    assert not below.is_saturated
    assert below.good_share >= 0.9
    assert above.is_saturated
    assert above.good_share < 0.5
    assert 0.5 * found.low < knee(found.runs).offered_rate < 2 * found.high


# With 64 sequences a step computes so much that the larger model is 3.8 times slower on the same two devices.
@pytest.mark.parametrize(("hardware", "devices"), [("h100", 2), ("a100", 4), ("h200", 2)])
@pytest.mark.parametrize("size", [1, 8, 16])
def test_a_model_ten_times_as_large_is_five_times_slower_and_eight_bits_recover_a_part(
    size: int, hardware: str, devices: int
) -> None:
    small, large, quantized = (
        run(deployment(model, hardware, devices, max_sequences=size), "at-once", max(8, 2 * size)).tpot.mean
        for model in (seven_billion(), seventy_billion(), seventy_billion(8))
    )
    assert large >= 5 * small
    assert 1.3 * small < quantized < 0.75 * large


# The longer prompts and outputs are, the less is left to gain: 4.6 times with 2,000 shared and 128 output tokens.
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("shared", "output_tokens"), [(500, 32), (500, 64), (500, 128), (1000, 32), (1000, 64), (1000, 128), (2000, 32)]
)
def test_all_that_helps_together_is_five_to_ten_times_the_naive_engine(
    shared: int, output_tokens: int, seed: int
) -> None:
    sizes = {"prompt_tokens": 100, "shared_tokens": shared, "output_tokens": output_tokens}
    naive = deployment(seven_billion(), batching="static", prefix_cache=False, max_sequences=8)
    tuned = deployment(seven_billion(8))
    slow, fast = (run(each, "at-once", 300, seed, **sizes).output_tokens_per_second for each in (naive, tuned))
    assert 5 * slow <= fast <= 10 * slow


def test_an_interval_is_as_wide_as_the_step_model_may_be_wrong() -> None:
    engines = deployment(seven_billion(), max_sequences=8)
    assert engines.times.relative_error == pytest.approx(0.35)  # type: ignore[attr-defined]
    sizes = RequestSizes(prompt_tokens=256, output_tokens=64)
    traffic = parse_traffic("poisson:4", sizes=sizes, count=80, context_tokens=4096)
    found = capacity(engines, traffic, LEVEL)
    assert found.least < 0.9 * found.low
    assert found.most > 1.1 * found.high


def test_requests_that_are_too_few_show_no_capacity() -> None:
    traffic = parse_traffic("poisson:1", sizes=RequestSizes(output_tokens=4), count=3, context_tokens=4096)
    with pytest.raises(UsageError, match="3 requests keep the service level even all at once"):
        capacity(deployment(seven_billion()), traffic, LEVEL)
