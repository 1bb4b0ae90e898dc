"""The header of a TensorRT-RTX plan."""

import pytest

from ingot.artifact.programs.plan_facts import read_plan_header
from ingot.errors import ArtifactError
from tests.pipeline.targets.tensorrt.test_plan_report import FUSED, plan


def test_the_header_has_sms_version_and_the_offset_of_the_weights() -> None:
    header = read_plan_header(plan(FUSED)[:512], "a plan")
    assert (header.sms, header.version, header.weight_bytes) == ((86, 89), "1.7.1.116", 8)
    assert header.weights_offset == len(plan(FUSED)) - 8


def test_a_file_of_another_format_is_refused_by_name() -> None:
    with pytest.raises(ArtifactError, match=r"segment-007.plan is not a TensorRT-RTX plan: it begins with b'PK"):
        read_plan_header(b"PK\3\4" + bytes(100), "segment-007.plan")
