"""The models that are measured on a card, as rows of a table: their shapes, how they are stored, their steps."""

from dataclasses import dataclass
from typing import Literal

from benchmarks.shapes import SHAPES, ModelShape

WeightForm = Literal["16-bit", "int4"]
KVForm = Literal["16-bit", "fp8", "int8", "int4"]


@dataclass(frozen=True)
class ProgramSpec:
    """A model's shape, how it is stored, and the steps that its programs are made for."""

    shape: ModelShape
    weights: WeightForm
    kv: KVForm = "16-bit"
    context_tokens: int = 32768
    decode_rows: tuple[int, ...] = (1, 8, 64)
    prefill_rows: tuple[int, ...] = (512, 4096)
    activations: str = "bfloat16"

    @property
    def name(self) -> str:
        """llama-3.1-8b-int4-kv-fp8"""
        return f"{self.shape.name}-{self.weights}-kv-{self.kv}"


LLAMA_8B = ModelShape(
    name="llama-3.1-8b",
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
    tied_head=False,
)
TINYLLAMA = SHAPES["tinyllama-1.1b"]
SPECS = (
    ProgramSpec(LLAMA_8B, "int4"),
    ProgramSpec(LLAMA_8B, "16-bit"),
    ProgramSpec(TINYLLAMA, "int4", context_tokens=4096),
    ProgramSpec(TINYLLAMA, "16-bit", context_tokens=4096),
    ProgramSpec(LLAMA_8B, "int4", "fp8"),
    ProgramSpec(LLAMA_8B, "int4", "int8"),
    ProgramSpec(LLAMA_8B, "int4", "int4"),
)
_DRY_FORMS: tuple[tuple[WeightForm, KVForm], ...] = (("16-bit", "int8"), ("int4", "16-bit"))
_TINY = ModelShape(
    name="tiny",
    hidden_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=96,
    vocab_size=400,
    tied_head=False,
)
DRY_SPECS = tuple(ProgramSpec(_TINY, weights, kv, 32, (1, 2), (4,), "float16") for weights, kv in _DRY_FORMS)
