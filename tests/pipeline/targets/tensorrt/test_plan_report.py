"""Header, programs and faults of a plan, on plans written by hand: needs no TensorRT."""

import struct

import pytest

from ingot.errors import BuildError
from ingot.pipeline.targets.tensorrt.plan_report import check_plan, read_programs
from ingot.pipeline.targets.tensorrt.plan_request import PlanRequest, Profile

FUSED = """main {
 label bb1:
  shape_call={ name="__mye1_0" stream=0 }
  runtime_fusion={ name=__myl_FcAdd input_args={ "x1.1" "x0.1" "__mye8^deref" } output_args={ "__k_9" } binary=0 }
  function={ name=__myl_SiluMul fqn=__myl_SiluMul_0x1 input_args={ "__k_9" } output_args={ "y0.1" } }
}
b_tensor={ base="w [profile 1].1" dims={ 8 8 } name="__mye8^deref" type=half }
}
main {
 label bb9:
  fully_connected={ name="Gemm_1" output={"a" } input={"b" "c" } }
}
"""
UNFUSED = """main {
 label bb1:
  function={ name=__myl_CastMul input_args={ "q.1" "__mye2_dconst" } output_args={ "w16" } layers="[ONNX Layer: deq]" }
  fully_connected={ name="Gemm_2" output={"y0.1" } input={"x0 [profile 1].1" "w16" } }
}
"""


def plan(*programs: str, mask: int = 0b1100, version: bytes = bytes((1, 7, 1, 116))) -> bytes:
    """A plan with this text and eight bytes of weights."""
    text = "".join(programs).encode()
    start = 0x80
    header = b"vtrt".ljust(8, b"\0") + struct.pack("<QQ", 2, start + len(text) + 8) + version.ljust(8, b"\0")
    table = b"THGW".ljust(8, b"\0") + struct.pack("<QQ", start + len(text), 8)
    return (header + struct.pack("<Q", mask)).ljust(0x40, b"\0") + table.ljust(start - 0x40, b"\0") + text + bytes(8)


def request(sms: tuple[int, ...] = (86, 89), profiles: int = 1, version: str = "1.7.1.116") -> PlanRequest:
    rows = {"x0": (8,), "x1": (8,)}
    return PlanRequest("", None, rows, ("n",), (Profile.of(1),) * profiles, sms, "tensorrt-rtx", version)


def test_operators_are_counted_per_profile_without_the_inside_of_fused_ones() -> None:
    facts = check_plan(plan(FUSED, FUSED), request(profiles=2), "program/segment-000.plan")
    assert [profile.operators for profile in facts.profiles] == [{"FcAdd": 1, "SiluMul": 1}] * 2
    assert (facts.sms, facts.bytes, facts.weight_bytes) == ((86, 89), len(plan(FUSED, FUSED)), 8)


def test_a_launch_that_reads_only_weights_is_found_with_its_nodes() -> None:
    (program,) = read_programs(plan(UNFUSED), 1)
    (constant,) = program.constant_launches({"x0"})
    assert (constant.operator, constant.reads, constant.nodes) == ("CastMul", ("q.1", "__mye2_dconst"), ("deq",))
    with pytest.raises(
        BuildError, match=r"would compute CastMul \(deq\) from weights alone in every step, which is slower"
    ):
        check_plan(plan(UNFUSED), request(), "a plan")


def test_reshaping_a_vector_is_allowed() -> None:
    text = UNFUSED.replace("__myl_CastMul", "__myl_Resh").replace('"q.1" "__mye2_dconst"', '"n [profile 1].1"')
    facts = check_plan(plan(text), request(), "a plan")
    assert facts.profiles[0].operators == {"Resh": 1, "fully_connected": 1}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request(sms=(86,)), "the plan is for SMs 86, 89, and the request names 86"),
        (request(version="1.8.0.1"), "the plan has version 1.7.1.116, and 1.8.0.1 built it"),
        (request(profiles=3), "text lists 1 programs for 3 profiles.*its fusions cannot be checked"),
    ],
)
def test_a_plan_that_does_not_match_the_request_is_refused(asked: PlanRequest, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        check_plan(plan(FUSED), asked, "a plan")


def test_a_plan_of_tensorrt_itself_is_accepted_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "ingot.notes"):
        facts = check_plan(b"ftrt" + bytes(100), request(sms=(90,)), "program/segment-000.plan")
    assert facts.profiles[0].operators == {}
    assert "its fusions are not checked" in caplog.text
