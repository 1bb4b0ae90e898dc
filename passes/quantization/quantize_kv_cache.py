"""The pass quantize-kv-cache: stores keys and values in 16, 8 or 4 bits.

    Matched         the model's KV geometry
    Replacement     the same in float32, float16, bfloat16, fp8 (e4m3), int8, int4, or k8v4 (keys int8, values int4);
                    in 8 bits each vector is divided by a float16 scale that maps its largest element to the type's
                    largest; in 4 bits each `group` of its dims has a scale and a minimum

No node changes: the kernels that write the pool round, those that read it multiply by the scale. A block of float32
becomes half (16 bits), a quarter (fp8, int8) or an eighth (int4) as large, plus the scales. float32 is the CPU's own
type: with it the pass changes nothing, so that a recipe that has the pass can be built without its rounding.

Refuses: int4 with heads of an odd size, as two elements share a byte; int4 and k8v4 with latent keys, of which values
are a part.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import onnx_ir as ir

from ingot.errors import PassError
from ingot.passes.base import Pass, PassKind
from ingot.passes.model_facts import KV

_Group = Literal[0, 16, 32, 64, 128]
_Precision = Literal["float32", "float16", "bfloat16", "fp8", "int8", "int4", "k8v4"]


@dataclass(frozen=True)
class QuantizeKVCache(Pass):
    """precision    for the CPU: float32, which rounds nothing; float16; bfloat16; k8v4, keys in 8 bits and values in 4;
    for the CPU and GPUs: fp8 (e4m3), from SM 89 on; int8; int4

    group        dims of int4 that share a scale and a minimum, for the CPU; 0: one scale for a vector, no minimum
    """

    name: ClassVar[str] = "quantize-kv-cache"
    kind: ClassVar[PassKind] = "quantization"
    summary: ClassVar[str] = "Keeps keys and values in 16, 8 or 4 bits, for targets whose kernels read them."
    changes_weights: ClassVar[bool] = False
    keeps_schemes: ClassVar[bool] = True

    precision: _Precision = "int8"
    group: _Group = 32

    @property
    def kv_precision(self) -> _Precision:
        """The option `precision`."""
        return self.precision

    @property
    def kv_group(self) -> int:
        """The option `group`, where the precision has values of int4."""
        return self.group if self.precision in ("int4", "k8v4") else 0

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Set the precision in the model's KV geometry."""
        before = KV.of(model)
        odd = next((dim for layer in before.layers for dim in (layer.key_dim, layer.value_dim) if dim % 2), None)
        if self.precision in ("int4", "k8v4") and odd:
            raise PassError(f"heads have {odd} dims, and two share a byte of int4; use int8")
        if self.precision in ("int4", "k8v4") and any(layer.value_dim == 0 for layer in before.layers):
            raise PassError(
                f"the model has latent keys, of which values are a part: precision is {self.precision}, which rounds "
                "values to 4 bits; use int8, fp8 or 16 bits"
            )
        after = before.model_copy(update={"dtype": self.precision, "int4_group": self.kv_group})
        KV.record(model, after)
        return ir.passes.PassResult(model, modified=before != after)
