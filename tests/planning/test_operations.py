"""An operation is limited by memory until the batch at which its intensity reaches the machine's."""

import pytest

from ingot.planning.hardware import find_hardware
from ingot.planning.load import Load
from ingot.planning.operations import decode_operations
from tests.planning.shapes import COUNTED, dense_shape, mixture_shape

H100 = find_hardware("h100")


def test_the_regime_changes_where_it_is_said_to() -> None:
    shape = dense_shape()
    first = decode_operations(shape, H100, Load(), 1)[0]
    assert first.regime == "memory"
    assert first.intensity < 1.01
    assert first.change_at is not None
    assert decode_operations(shape, H100, Load(), first.change_at - 1)[0].regime == "memory"
    assert decode_operations(shape, H100, Load(), first.change_at)[0].regime == "compute"


def test_four_bits_change_at_a_quarter_of_the_batch() -> None:
    half = decode_operations(dense_shape(), H100, Load(), 1)[0].change_at
    quarter = decode_operations(dense_shape(bits=4), H100, Load(), 1)[0].change_at
    assert half is not None
    assert quarter is not None
    assert 3.9 < half / quarter < 4.1


def test_attention_never_changes_with_the_batch() -> None:
    one, many = (decode_operations(dense_shape(), H100, Load(), rows)[-1] for rows in (1, 256))
    assert one.intensity == many.intensity
    assert one.change_at is None


def test_counted_experts_replace_equally_likely_ones() -> None:
    def expert_bytes(rows: int, *reach: tuple[float, float]) -> float:
        operations = decode_operations(mixture_shape(reach=reach), H100, Load(), rows)
        return next(one.bytes for one in operations if "expert" in one.name)

    assert expert_bytes(1, *COUNTED) == pytest.approx(expert_bytes(1))
    # 32 rows reach half of the experts as counted, 1 - (15 / 16) ** 32 = 87 % if all are equally likely.
    assert expert_bytes(32, *COUNTED) / expert_bytes(32) == pytest.approx(0.5 / 0.873, rel=0.01)
