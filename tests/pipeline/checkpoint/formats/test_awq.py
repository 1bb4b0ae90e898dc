"""AWQ's gemm layout: decodes to the packages' weights, encodes to their tensors, refuses other settings."""

from pathlib import Path
from typing import Any

import pytest

from ingot.pipeline.checkpoint.formats import awq
from tests.pipeline.checkpoint.formats.golden import (
    assert_decodes_to_the_packages_weights,
    assert_differs_only_by_rounding,
    assert_stored,
    decoded_layers,
    names_of,
)
from tests.pipeline.checkpoint.formats.refusals import assert_setting_is_refused


@pytest.mark.parametrize("name", names_of("awq"))
def test_a_folder_decodes_to_the_packages_weights(name: str) -> None:
    assert_decodes_to_the_packages_weights(name)


def test_a_package_that_computes_in_sixteen_bits_differs_only_by_rounding() -> None:
    assert_differs_only_by_rounding("gptqmodel-awq_gemm-w4-asym")


def test_a_decoded_layer_encodes_to_the_packages_own_tensors() -> None:
    for weight, stored in decoded_layers("autoawq-gemm-w4-asym"):
        assert_stored(awq.encode(weight), stored)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "gemv_fast"}, "version is 'gemv_fast'; Ingot reads 'gemm' and no other layout of AWQ"),
        ({"bits": 8}, "bits is 8; it must be 4"),
        ({"zero_point": False}, "zero_point is False; it must be True"),
    ],
)
def test_an_unsupported_setting_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    assert_setting_is_refused(tmp_path, "awq", changes, message)
