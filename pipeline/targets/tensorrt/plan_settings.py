"""Settings of a program's plans: SMs, and numbers of rows (TensorRT's optimization profiles).

    weights are inputs          an exact profile for every decode bucket; one range for the rows of all other buckets
    weights are constants       an exact profile for one row; one range for all other decode buckets; the rest as above

A profile costs a plan about 0.7 MB and 0.7 s. That is little for the few plans that all layers share, and much if each
layer has a plan of its own; both launch the same kernels (docs/log.md).

    SM 75                  fp16, int8
    SM 80, 86              also bf16 and int4
    SM 89, 120, 121        also fp8

TensorRT-RTX builds no plans for SM 90 and 100: data-centre GPUs have the targets cuda-smXX.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ingot.errors import UsageError
from ingot.pipeline.targets.cuda.program_builder import Bucket
from ingot.pipeline.targets.segments.segment import Segment
from ingot.pipeline.targets.segments.segment_builder import NumberFormat
from ingot.pipeline.targets.segments.segment_calls import TOKENS
from ingot.pipeline.targets.tensorrt.library import Library
from ingot.pipeline.targets.tensorrt.plan_builder import PlanCache
from ingot.pipeline.targets.tensorrt.plan_request import Profile

LOGITS = "R"
Profiles = Mapping[str, tuple[Profile, ...]]  # row symbol (TOKENS, LOGITS) -> profiles
LEAST_SM: Mapping[NumberFormat, int] = {"fp16": 75, "int8": 75, "bf16": 80, "int4": 80, "fp8": 89}
_INSTEAD: Mapping[NumberFormat, str] = {
    "bf16": "fp16 activations",
    "int4": "int8",
    "fp8": "int8, or int4",
}
_DATA_CENTRE = {90: "cuda-sm90", 100: "", 103: ""}


@dataclass(frozen=True)
class PlanSettings:
    """Settings of all plans of a program."""

    library: Library
    sms: tuple[int, ...]
    profiles: Profiles
    cache: PlanCache


def bucket_profiles(buckets: Sequence[Bucket]) -> Profiles:
    """Return the exact profiles in ascending order, then the range, for each symbol of rows."""
    decode = sorted({bucket.rows for bucket in buckets if bucket.attention == "decode"})
    ragged = [bucket.rows for bucket in buckets if bucket.attention == "ragged"]
    ranges = [Profile(min(ragged), max(ragged), max(ragged))] if ragged else []
    logits = sorted({bucket.logits_rows for bucket in buckets})
    return {TOKENS: (*map(Profile.of, decode), *ranges), LOGITS: tuple(map(Profile.of, logits))}


def segment_profiles(profiles: Profiles, segment: Segment) -> tuple[Profile, ...]:
    """Return the profiles of a segment's plan."""
    given = profiles[segment.row_symbol]
    exact = [profile for profile in given if profile.least == profile.most]
    if not segment.constant_bytes or len(exact) < 3:
        return given
    rest = Profile(exact[1].least, exact[-1].most, exact[-1].most)
    return (exact[0], rest, *(profile for profile in given if profile not in exact))


def profile_number(profiles: Sequence[Profile], rows: int) -> int:
    """Return the profile to run: the first that allows so many rows, so that buckets of equal rows share contexts."""
    return next(number for number, profile in enumerate(profiles) if profile.least <= rows <= profile.most)


def check_sms(library: Library, sms: Sequence[int], formats: Collection[NumberFormat]) -> None:
    """Raise UsageError for an SM that the library builds no plans for, or that does not compute a number format."""
    if not sms:
        raise UsageError(f"no SMs are named to build TensorRT plans for; allowed: {_allowed(library)}")
    if len(set(sms)) < len(sms):
        raise UsageError(f"SMs {list(sms)} name one twice: take it out")
    if library.is_rtx:
        for sm in sms:
            _check_known(library, sm)
    elif len(sms) > 1:
        raise UsageError(
            f"TensorRT builds plans only for this machine's GPU, and SMs {list(sms)} are several: name that GPU's SM"
        )
    for number_format in sorted(formats):
        _check_format(number_format, sms)


def _check_known(library: Library, sm: int) -> None:
    if sm in library.sms:
        return
    advice = ""
    if sm in _DATA_CENTRE:
        target = _DATA_CENTRE[sm]
        advice = ", a data-centre GPU" + (f": use target {target}" if target else "")
    raise UsageError(
        f"TensorRT-RTX {library.version} builds no plans for SM {sm}{advice}; allowed: {_allowed(library)}"
    )


def _check_format(number_format: NumberFormat, sms: Sequence[int]) -> None:
    least = LEAST_SM[number_format]
    too_old = [sm for sm in sms if sm < least]
    if too_old:
        raise UsageError(
            f"{number_format} needs SM {least} or newer, and gpu.sms names SM {too_old[0]}; take it out, or use "
            f"{_INSTEAD[number_format]}"
        )


def _allowed(library: Library) -> str:
    return ", ".join(map(str, library.sms)) or "the SM of this machine's GPU"
