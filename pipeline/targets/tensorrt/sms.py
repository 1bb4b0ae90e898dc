"""Which cards a plan can be built for, and what those cards can compute: refused by name before anything is built.

    SM 75                  fp16, int8
    SM 80, 86              bf16 and int4 beside
    SM 89, 120, 121        fp8 beside

TensorRT-RTX has no plans for SM 90 and 100: data-centre cards have the targets cuda-smXX.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from ingot.errors import UsageError
from ingot.pipeline.targets.tensorrt.library import Library

Form = Literal["fp16", "bf16", "int8", "fp8", "int4"]

LEAST_SM: Mapping[Form, int] = {"fp16": 75, "int8": 75, "bf16": 80, "int4": 80, "fp8": 89}
_INSTEAD: Mapping[Form, str] = {
    "bf16": "fp16 activations",
    "int4": "int8",
    "fp8": "int8, or int4",
}
_DATA_CENTRE = {90: "cuda-sm90", 100: "", 103: ""}


def check_sms(library: Library, sms: Sequence[int], forms: Collection[Form]) -> None:
    """UsageError for an SM that the library does not build for, or that lacks what one of the forms needs."""
    if not sms:
        raise UsageError(f"no SMs are named to build TensorRT plans for; allowed: {_allowed(library)}")
    if len(set(sms)) < len(sms):
        raise UsageError(f"SMs {list(sms)} name one twice: take it out")
    if library.is_rtx:
        for sm in sms:
            _check_known(library, sm)
    elif len(sms) > 1:
        raise UsageError(f"TensorRT builds plans for the card at hand; SMs {list(sms)} are several: name that card's")
    for form in sorted(forms):
        _check_form(form, sms)


def _check_known(library: Library, sm: int) -> None:
    if sm in library.sms:
        return
    advice = ""
    if sm in _DATA_CENTRE:
        target = _DATA_CENTRE[sm]
        advice = "; it has none for data-centre cards" + (f": use target {target}" if target else "")
    raise UsageError(
        f"TensorRT-RTX {library.version} builds no plans for SM {sm}{advice}; allowed: {_allowed(library)}"
    )


def _check_form(form: Form, sms: Sequence[int]) -> None:
    too_old = [sm for sm in sms if sm < LEAST_SM[form]]
    if too_old:
        raise UsageError(
            f"{form} needs SM {LEAST_SM[form]} or newer, and SM {too_old[0]} is asked for; take it out of the SMs, or "
            f"use {_INSTEAD[form]}"
        )


def _allowed(library: Library) -> str:
    return ", ".join(map(str, library.sms)) or "that of the card at hand"
