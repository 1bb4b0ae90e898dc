"""SMs and numbers of rows that plans are built for."""

from types import SimpleNamespace

import pytest

from ingot.errors import UsageError
from ingot.pipeline.targets.cuda.program_builder import Bucket
from ingot.pipeline.targets.segments.segment_builder import NumberFormat
from ingot.pipeline.targets.tensorrt.library import Library
from ingot.pipeline.targets.tensorrt.plan_request import Profile
from ingot.pipeline.targets.tensorrt.plan_settings import bucket_profiles, check_sms, profile_number, segment_profiles
from tests.each_case import each_case
from tests.pipeline.targets.tensorrt.models import prepared, segments_of

DECODE = tuple(Bucket.decode(rows, 64) for rows in (1, 2, 4, 8))
RAGGED = tuple(Bucket.ragged(rows, 64, 8) for rows in (4, 16, 64))


def test_decode_buckets_have_exact_profiles_and_all_others_share_a_range() -> None:
    profiles = bucket_profiles((*DECODE, *RAGGED))
    assert profiles["T"] == (*map(Profile.of, (1, 2, 4, 8)), Profile(4, 64, 64))
    assert profiles["R"] == tuple(map(Profile.of, (1, 2, 4, 8)))
    assert bucket_profiles(DECODE)["T"] == tuple(map(Profile.of, (1, 2, 4, 8)))


def test_plans_with_constant_weights_have_one_range_for_all_decode_buckets_after_the_first() -> None:
    profiles = bucket_profiles((*DECODE, *RAGGED))
    constants, inputs = segments_of(prepared("int4"))[1], segments_of(prepared())[1]
    assert segment_profiles(profiles, constants) == (Profile.of(1), Profile(2, 8, 8), Profile(4, 64, 64))
    assert segment_profiles(profiles, inputs) == profiles["T"]


def test_a_bucket_runs_the_first_profile_that_holds_its_rows() -> None:
    exact, merged = bucket_profiles((*DECODE, *RAGGED))["T"], (Profile.of(1), Profile(2, 8, 8), Profile(4, 64, 64))
    assert [profile_number(exact, rows) for rows in (1, 2, 4, 8, 16, 64)] == [0, 1, 2, 3, 4, 4]
    assert [profile_number(merged, rows) for rows in (1, 2, 4, 8, 16, 64)] == [0, 1, 1, 1, 2, 2]


MEMBERS = dict.fromkeys(("SM75", "SM80", "SM86", "SM89", "SM120", "SM121", "CURRENT", "NONE"))
RTX = Library(SimpleNamespace(ComputeCapability=SimpleNamespace(__members__=MEMBERS)), "tensorrt-rtx", "1.7.1.116")
FULL = Library(SimpleNamespace(), "tensorrt", "11.4.0")


def test_sms_that_compute_all_number_formats_are_accepted() -> None:
    check_sms(RTX, (89, 120), {"bf16", "fp8", "int4"})
    check_sms(FULL, (90,), {"fp8"})


@each_case(
    ("sms", "formats", "message"),
    [
        ((), set(), "no SMs are named to build TensorRT plans for; allowed: 75, 80, 86, 89, 120, 121"),
        ((86, 86), set(), "name one twice"),
        ((87,), set(), "1.7.1.116 builds no plans for SM 87; allowed: 75, 80"),
        ((86, 90), set(), "no plans for SM 90, a data-centre GPU: use target cuda-sm90; allowed"),
        ((100,), set(), "no plans for SM 100, a data-centre GPU; allowed"),
        ((86, 89), {"fp8"}, "fp8 needs SM 89 or newer, and gpu.sms names SM 86; take it out, or use int8"),
        ((80,), {"fp8", "fp16"}, "fp8 needs SM 89"),
        ((75,), {"bf16"}, "bf16 needs SM 80 or newer, and gpu.sms names SM 75.*use fp16 activations"),
        ((75,), {"int4"}, "int4 needs SM 80"),
    ],
)
def test_an_unsuitable_sm_is_refused(sms: tuple[int, ...], formats: set[NumberFormat], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_sms(RTX, sms, formats)


def test_tensorrt_builds_for_one_gpu() -> None:
    with pytest.raises(UsageError, match=r"only for this machine's GPU, and SMs .80, 90. are several"):
        check_sms(FULL, (80, 90), set())
