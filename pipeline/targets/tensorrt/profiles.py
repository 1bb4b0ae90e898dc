"""Optimization profiles: the numbers of rows that plans are prepared for.

    weights are inputs          every decode bucket its own, exactly; one that ranges over all other buckets' rows
    weights are constants       a single row; all other decode buckets in one range; the others as above

Each profile costs a plan some 0.7 MB and 0.7 s. That is nothing for the few plans that all layers share, and much where
each layer has its own; what is launched is the same (docs/log.md).
"""

from collections.abc import Mapping, Sequence

from ingot.pipeline.targets.cuda.program_builder import Bucket
from ingot.pipeline.targets.segments.segment import Segment
from ingot.pipeline.targets.tensorrt.plan_request import Profile

TOKENS, LOGITS = "T", "R"
Profiles = Mapping[str, tuple[Profile, ...]]


def bucket_profiles(buckets: Sequence[Bucket]) -> Profiles:
    """By what rows are, T tokens or R rows of logits: the exact ones in ascending order, then the range."""
    decode = sorted({bucket.rows for bucket in buckets if bucket.attention == "decode"})
    ragged = [bucket.rows for bucket in buckets if bucket.attention == "ragged"]
    ranges = [Profile(min(ragged), max(ragged), max(ragged))] if ragged else []
    logits = sorted({bucket.logits_rows for bucket in buckets})
    return {TOKENS: (*map(Profile.of, decode), *ranges), LOGITS: tuple(map(Profile.of, logits))}


def segment_profiles(profiles: Profiles, segment: Segment) -> tuple[Profile, ...]:
    """Those that the segment's plan has."""
    given = profiles[segment.row_symbol]
    exact = [profile for profile in given if profile.least == profile.most]
    if not segment.constant_bytes or len(exact) < 3:
        return given
    rest = Profile(exact[1].least, exact[-1].most, exact[-1].most)
    return (exact[0], rest, *(profile for profile in given if profile not in exact))


def profile_number(profiles: Sequence[Profile], rows: int, *, is_ragged: bool) -> int:
    """The profile for so many rows; of several that hold them, the last for ragged steps and the first for others."""
    fitting = [number for number, profile in enumerate(profiles) if profile.least <= rows <= profile.most]
    return fitting[-1] if is_ragged else fitting[0]
