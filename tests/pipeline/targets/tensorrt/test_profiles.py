"""Which profiles plans have, and which one a bucket runs."""

from ingot.pipeline.targets.cuda.program_builder import Bucket
from ingot.pipeline.targets.tensorrt.plan_request import Profile
from ingot.pipeline.targets.tensorrt.profiles import bucket_profiles, profile_number, segment_profiles
from tests.pipeline.targets.tensorrt.models import prepared, segments_of

DECODE = tuple(Bucket.decode(rows, 64) for rows in (1, 2, 4, 8))
RAGGED = tuple(Bucket.ragged(rows, 64, 8) for rows in (4, 16, 64))


def test_decode_buckets_have_exact_profiles_and_all_others_share_a_range() -> None:
    profiles = bucket_profiles((*DECODE, *RAGGED))
    assert profiles["T"] == (*map(Profile.of, (1, 2, 4, 8)), Profile(4, 64, 64))
    assert profiles["R"] == tuple(map(Profile.of, (1, 2, 4, 8)))
    assert bucket_profiles(DECODE)["T"] == tuple(map(Profile.of, (1, 2, 4, 8)))


def test_plans_that_hold_their_weights_have_one_range_for_the_decode_buckets_beyond_the_first() -> None:
    profiles = bucket_profiles((*DECODE, *RAGGED))
    constants, inputs = segments_of(prepared("int4"))[1], segments_of(prepared())[1]
    assert segment_profiles(profiles, constants) == (Profile.of(1), Profile(2, 8, 8), Profile(4, 64, 64))
    assert segment_profiles(profiles, inputs) == profiles["T"]


def test_a_bucket_runs_the_profile_of_its_kind() -> None:
    exact, merged = bucket_profiles((*DECODE, *RAGGED))["T"], (Profile.of(1), Profile(2, 8, 8), Profile(4, 64, 64))
    assert [profile_number(exact, rows, is_ragged=False) for rows in (1, 2, 4, 8)] == [0, 1, 2, 3]
    assert [profile_number(exact, rows, is_ragged=True) for rows in (4, 16, 64)] == [4, 4, 4]
    assert [profile_number(merged, rows, is_ragged=False) for rows in (1, 2, 4, 8)] == [0, 1, 1, 1]
    assert [profile_number(merged, rows, is_ragged=True) for rows in (4, 64)] == [2, 2]
