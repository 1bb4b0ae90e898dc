"""A replica takes the fewest devices that hold it; bubbles, all-to-alls and transfers follow their formulas."""

import pytest

from ingot.planning.hardware import find_hardware
from ingot.planning.parallelism import (
    Parallelism,
    bubble_share,
    choose_parallelism,
    disaggregation,
    layouts,
    stage_transfer_seconds,
)
from ingot.planning.roofline import IDEAL, data_sheet
from ingot.planning.step_model import StepShape
from tests.planning.shapes import dense_shape, mixture_shape

H100 = find_hardware("h100")
LLAMA_405B = dense_shape(126, 16384, 53248, 128, 8)


def test_the_fewest_devices_that_suffice() -> None:
    small = choose_parallelism(dense_shape(), H100, 4096, 1)
    assert small is not None
    assert str(small) == "one device"
    large = choose_parallelism(LLAMA_405B, H100, 4096, 1)
    assert large is not None
    assert (large.tensor, large.pipeline) == (8, 2)
    assert choose_parallelism(LLAMA_405B, find_hardware("rtx-4090"), 4096, 1, devices=4) is None


def test_more_sequences_need_more_devices() -> None:
    few, many = (choose_parallelism(dense_shape(), H100, 8192, count) for count in (1, 100))
    assert few is not None
    assert many is not None
    assert many.devices > few.devices
    assert many.sequences >= 100


def test_a_pipeline_idles_less_with_more_microbatches() -> None:
    assert bubble_share(4, 1) == 0.75
    assert bubble_share(4, 13) == pytest.approx(3 / 16)
    assert bubble_share(1, 1) == 0


def test_transfers_take_bytes_over_bandwidth() -> None:
    shape = dense_shape()
    assert stage_transfer_seconds(shape, H100, 10) == pytest.approx(10 * 4096 * 2 / 50e9)
    found = disaggregation(dense_shape(80, 8192, 28672, 64, 8), 50e9, 2048, 256, interference=0.02)
    assert found.transfer_bytes == 671_088_640
    assert found.transfer_seconds * 1e3 == pytest.approx(13.4, abs=0.05)
    assert found.interference_seconds == pytest.approx(5.12)
    assert found.pays


DECODE = StepShape(decode_rows=64, context_tokens=64 * 1024, num_sequences=64)


def seconds(layout: Parallelism, term: str, microbatches: int = 1, hardware: str = "h100") -> float:
    """Seconds of one term of a step of the mixture, on an ideal machine."""
    model = data_sheet(mixture_shape(), find_hardware(hardware), IDEAL, layout=layout, microbatches=microbatches)
    return sum(each.seconds for each in model.terms(DECODE) if each.name == term)


def test_spread_experts_are_read_once_and_all_other_weights_by_each_device() -> None:
    one, eight = Parallelism(1, 1, 0), Parallelism(1, 1, 0, expert=8)
    assert seconds(eight, "experts") == pytest.approx(seconds(one, "experts") / 8)
    assert seconds(eight, "linear layers") == pytest.approx(seconds(one, "linear layers"))
    assert seconds(eight, "decode attention") == pytest.approx(seconds(one, "decode attention") / 8)


def test_an_all_to_all_moves_each_choice_of_an_expert_that_is_on_another_device() -> None:
    # 2 ways x 32 layers x 8 experts x 2048 values of 2 bytes x 64 rows, from each of 8 devices to 7 others
    moved = 2 * 32 * 8 * 2048 * 2 * 64
    assert seconds(Parallelism(1, 1, 0, expert=8), "all-to-alls") == pytest.approx(moved / 8 * 7 / 8 / 450e9)
    assert seconds(Parallelism(1, 1, 0, expert=1), "all-to-alls") == 0
    # Of 16 devices, 7 others are in the node and 8 beyond it.
    both = moved / 16 * (7 / 16 / 450e9 + 8 / 16 / 50e9)
    assert seconds(Parallelism(1, 1, 0, expert=16), "all-to-alls") == pytest.approx(both)
    # L40S have no link but the host's.
    pcie = seconds(Parallelism(1, 1, 0, expert=8), "all-to-alls", hardware="l40s")
    assert pcie == pytest.approx(moved / 8 * 7 / 8 / 32e9)


def test_a_step_of_one_microbatch_takes_a_pipeline_as_long_as_one_stage_with_all_layers() -> None:
    whole, stages = (data_sheet(dense_shape(), H100, IDEAL, layout=Parallelism(8, n, 0)) for n in (1, 4))
    handed = 3 * stage_transfer_seconds(dense_shape(), H100, 64)
    assert stages.seconds(DECODE) == pytest.approx(whole.seconds(DECODE) + handed)


def test_the_bubble_is_its_share_of_every_term_and_shrinks_with_microbatches() -> None:
    for microbatches in (1, 4, 16):
        layout = Parallelism(8, 4, 0)
        work, bubble = (
            seconds(layout, name, microbatches) for name in ("decode attention", "pipeline bubble of decode attention")
        )
        assert bubble / (work + bubble) == pytest.approx(bubble_share(4, microbatches))
    few, many = (seconds(Parallelism(8, 4, 0), "decode attention", count) for count in (1, 16))
    assert many == pytest.approx(few)


def test_a_mixture_has_a_layout_with_spread_experts_beside_each_tensor_parallel_one() -> None:
    found = [way for way in layouts(mixture_shape(), H100, 4096) if way.devices == 8]
    assert [(way.tensor, way.expert) for way in found] == [(8, 1), (1, 8)]
    # 4 KV heads on 8 devices are stored twice; with spread experts each sequence is on one device.
    assert found[1].sequences > found[0].sequences
    assert not any(way.expert > 1 for way in layouts(dense_shape(), H100, 4096))
