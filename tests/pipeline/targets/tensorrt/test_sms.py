"""Cards and forms that are refused before anything is built."""

from types import SimpleNamespace

import pytest

from ingot.errors import UsageError
from ingot.pipeline.targets.tensorrt.library import Library
from ingot.pipeline.targets.tensorrt.sms import Form, check_sms

MEMBERS = dict.fromkeys(("SM75", "SM80", "SM86", "SM89", "SM120", "SM121", "CURRENT", "NONE"))
RTX = Library(SimpleNamespace(ComputeCapability=SimpleNamespace(__members__=MEMBERS)), "tensorrt-rtx", "1.7.1.116")
FULL = Library(SimpleNamespace(), "tensorrt", "11.4.0")


def test_cards_that_have_what_the_forms_need_are_let_through() -> None:
    check_sms(RTX, (89, 120), {"bf16", "fp8", "int4"})
    check_sms(FULL, (90,), {"fp8"})


@pytest.mark.parametrize(
    ("sms", "forms", "message"),
    [
        ((), set(), "no SMs are named to build TensorRT plans for; allowed: 75, 80, 86, 89, 120, 121"),
        ((86, 86), set(), "name one twice"),
        ((87,), set(), "1.7.1.116 builds no plans for SM 87; allowed: 75, 80"),
        ((86, 90), set(), "no plans for SM 90; it has none for data-centre cards: use target cuda-sm90; allowed"),
        ((100,), set(), "no plans for SM 100; it has none for data-centre cards; allowed"),
        ((86, 89), {"fp8"}, "fp8 needs SM 89 or newer, and SM 86 is asked for; take it out of the SMs, or use int8"),
        ((80,), {"fp8", "fp16"}, "fp8 needs SM 89"),
        ((75,), {"bf16"}, "bf16 needs SM 80 or newer, and SM 75 is asked for.*use fp16 activations"),
        ((75,), {"int4"}, "int4 needs SM 80"),
    ],
)
def test_what_a_card_cannot_do_is_refused(sms: tuple[int, ...], forms: set[Form], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_sms(RTX, sms, forms)


def test_tensorrt_builds_for_one_card() -> None:
    with pytest.raises(UsageError, match=r"for the card at hand; SMs .80, 90. are several"):
        check_sms(FULL, (80, 90), set())
