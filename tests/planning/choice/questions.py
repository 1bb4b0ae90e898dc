"""Small questions for tests of a choice: two variants of a Llama on priced hardware, and a few short requests."""

from ingot.planning.choice.configuration import Configuration, PricedHardware, RecipeVariant, configurations
from ingot.planning.choice.search import Limits, Question
from ingot.planning.hardware import find_hardware
from ingot.planning.service_levels import LevelBounds
from ingot.planning.simulation.traffic import RequestSizes, parse_traffic
from tests.planning.shapes import dense_shape, subject

PRICES = {"a100": 1.3, "h100": 3.0, "l4": 0.5}


def variants() -> list[RecipeVariant]:
    """16-bit weights of 8 billion parameters, and the same model in 4 bits."""
    return [
        RecipeVariant("fp16-cuda", (), subject(dense_shape())),
        RecipeVariant("int4-cuda", (), subject(dense_shape(bits=4.5))),
    ]


def found(*names: str, most_devices: int = 1) -> list[Configuration]:
    hardware = [PricedHardware(name, find_hardware(name), PRICES[name], "a test") for name in names]
    return list(configurations(variants(), hardware, most_devices=most_devices))


def question(
    rate: float = 4.0, *, requests: int = 32, limits: Limits | None = None, level: LevelBounds | None = None
) -> Question:
    traffic = parse_traffic(
        f"poisson:{rate:g}",
        sizes=RequestSizes(prompt_tokens=256, output_tokens=16, spread=0.3),
        count=requests,
        context_tokens=8192,
    )
    return Question(
        traffic, level or LevelBounds(words="a test", ttft=0.5, tpot=0.1, percentile=0.9), limits or Limits()
    )
