"""The pass mixed-precision: 2, 3, 4, 8 or 16 bits and a block size for each weight, by the loss that each causes.

    Matched         Gemm(x, W, b?, transB=1)
    Replacement     the same node, with its scheme in metadata_props["ingot.scheme"]: schemes.py

The loss of each weight under each scheme is measured: the mean KL of the model's logits on calibration tokens when only
this weight is quantized (sensitivity.py). An exact knapsack (knapsack.py) then finds the assignment with the smallest
sum of losses within a budget of bytes, or the fewest bytes within a budget of KL. No weight is rounded here:
quantize-weights or gptq must follow, and takes each weight's bits, block size and symmetry from the assignment; the
embedding and the head have that pass's own options unless `embedding` or `lm_head` is set. All readers of one tensor
get one scheme, and so do q, k and v, or gate and up, of one module, which engines pack.

Choosing bits by a measured sensitivity and an integer program follows HAWQ-V3 (Yao et al., arXiv:2011.10680), with the
measured KL instead of its Hessian trace.

The table is in the model's metadata "ingot.mixed-precision" as JSON: {options, budget, bytes, bits_per_weight,
predicted_kl, uniform: [{bits, block_size, bytes, kl}, ...], weights: [{name, shape, bits, block_size, bytes, kl,
measured, alternatives}, ...]}. predicted_kl is the sum of the losses. `measured` is false for a loss that was not run
but inferred from the error of the weight's outputs (sensitivity.py).

Refuses: a budget that no assignment meets, with the smallest reachable one; a model without a weight to choose for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import onnx_ir as ir

from ingot.errors import PassError, UsageError, shown
from ingot.options import Range
from ingot.passes.base import TOKENS, Pass, PassKind
from ingot.passes.calibration import require_calibration
from ingot.passes.model_facts import Fact
from ingot.passes.numerics.scheme import BlockSize, ScaleDtype, Scheme, WeightBits
from ingot.passes.quantization.bit_assignment import Assignment, Budget, Count, assign, elements_of, stored_bytes
from ingot.passes.quantization.schemes import assign_scheme, parse_overrides
from ingot.passes.quantization.sensitivity import (
    Points,
    Rounding,
    Sensitivity,
    assumed_sensitivities,
    weight_sensitivities,
)
from ingot.passes.rewriting import require_plain_gemm
from ingot.passes.weights import Role, require_matches, weight_sites

MIXED_FACTS: Fact[dict[str, Any]] = Fact("ingot.mixed-precision", dict)  # see the module's docstring

_BUDGETS = ("same_size_as", "budget_bits", "budget_bytes", "budget_kl")
_SAME_SIZE: Mapping[str, object] = {"bits": 4, "block_size": 128}


@dataclass(frozen=True)
class MixedPrecision(Pass):
    """Options. Give at most one budget; the default is the size of 4 bits in blocks of 128:

    same_size_as    {bits, block_size}: the size that all weights have under one scheme
    budget_bits     mean bits per weight, scales and zero points included
    budget_bytes    bytes of the weights that are assigned
    budget_kl       nats per token; the assignment with the fewest bytes
    bits            bits to choose from; 16 leaves a weight unquantized
    block_sizes     block sizes to choose from; 0 or "channel": a whole row
    symmetric       of all schemes
    scale_dtype     of all schemes: that of the quantizer that follows
    count           bytes as an artifact for the engine "native" or "onnxruntime" stores them, or as GPTQ and
                    compressed-tensors do ("nominal")
    rounding        "nearest" or "gptq": how trials are rounded; use that of the quantizer that follows
    points          losses that are run for each weight: 1, 2 or "all"; the others are inferred
    tokens          calibration tokens that each loss is run on, in whole sequences
    lm_head         choose for the head, too
    embedding       choose for the table, too
    exclude         patterns of weights that get no scheme and count in no budget
    """

    name: ClassVar[str] = "mixed-precision"
    kind: ClassVar[PassKind] = "quantization"
    summary: ClassVar[str] = "Chooses each weight's bits and block size within a budget, by its measured effect."
    needs_calibration: ClassVar[bool] = True
    changes_weights: ClassVar[bool] = False
    assigns_schemes: ClassVar[bool] = True

    same_size_as: Mapping[str, object] | None = None
    budget_bits: Annotated[float, Range(gt=0, le=32)] | None = None
    budget_bytes: Annotated[int, Range(ge=1, le=1 << 50)] | None = None
    budget_kl: Annotated[float, Range(gt=0, le=100)] | None = None
    bits: tuple[Literal[2, 3, 4, 8, 16], ...] = (2, 3, 4, 8, 16)
    block_sizes: tuple[BlockSize, ...] = (32, 64, 128)
    symmetric: bool = False
    scale_dtype: ScaleDtype = "float32"
    count: Count = "native"
    rounding: Rounding = "nearest"
    points: Points = 2
    tokens: Annotated[int, TOKENS] = 4096
    lm_head: bool = False
    embedding: bool = False
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [option for option in _BUDGETS if getattr(self, option) is not None]
        if len(given) > 1:
            raise UsageError(f"{self.name}: {' and '.join(given)} are given; give one budget")
        if not self._schemes():
            raise UsageError(
                f"{self.name}: bits is {shown(list(self.bits))} and block_sizes {shown(list(self.block_sizes))}; "
                "give both, and one of 2, 3, 4 or 8 among the bits"
            )
        self._uniform()

    def requires(self, model: ir.Model) -> None:
        """Every Gemm is x @ W.T + b."""
        sites = weight_sites(model)
        for site in sites:
            require_plain_gemm(site.node)
        require_matches(sites, "exclude", self.exclude)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Measure the losses, assign schemes, record both."""
        calibration = require_calibration(self.name)
        weights = weight_sensitivities(
            model,
            calibration,
            self._schemes(),
            tokens=self.tokens,
            rounding=self.rounding,
            points=self.points,
            roles=self._roles(),
            exclude=self.exclude,
            name=self.name,
        )
        if not weights:
            raise PassError("no weight is left to choose bits for; put it before the pass that quantizes")
        budget = self._budget(weights)
        assignment = assign(weights, budget, self.count, may_stay=16 in self.bits)
        before = MIXED_FACTS.find(model)
        MIXED_FACTS.record(model, self._facts(assignment, budget))
        calibration.facts.record(model)
        changes = [assign_scheme(w.sites, c.scheme) for w, c in zip(weights, assignment.picked, strict=True)]
        return ir.passes.PassResult(model, modified=any(changes) or before != MIXED_FACTS.of(model))

    def assign_without_data(self, model: ir.Model) -> None:
        """Assign schemes that fill the budget, as those of a build do, with losses that follow from bits alone.

        The bytes are those of a build; which weight gets which bits is not. Nothing for a budget in nats.
        """
        weights = assumed_sensitivities(model, self._schemes(), self._roles(), self.exclude)
        if weights and self.budget_kl is None:
            picked = assign(weights, self._budget(weights), self.count, may_stay=16 in self.bits).picked
            for weight, candidate in zip(weights, picked, strict=True):
                assign_scheme(weight.sites, candidate.scheme)

    def _schemes(self) -> list[Scheme]:
        codes: list[WeightBits] = [bits for bits in self.bits if bits != 16]
        found = (
            Scheme.of(bits, size, self.symmetric, scale_dtype=self.scale_dtype)
            for bits in codes
            for size in self.block_sizes
        )
        return list(dict.fromkeys(found))

    def _roles(self) -> frozenset[Role]:
        chosen: dict[Role, bool] = {"linear": True, "head": self.lm_head, "embedding": self.embedding}
        return frozenset(role for role, is_chosen in chosen.items() if is_chosen)

    def _uniform(self) -> Scheme:
        """The scheme of `same_size_as`, with the checks of an override."""
        given = _SAME_SIZE if self.same_size_as is None else self.same_size_as
        override = parse_overrides(self.name, {"same_size_as": given})["same_size_as"]
        if override is None or not {"bits", "block_size"} <= override.keys():
            raise UsageError(f"{self.name}: same_size_as is {shown(dict(given))}; allowed: bits and block_size, both")
        common = Scheme(override["bits"], override["block_size"], self.symmetric, scale_dtype=self.scale_dtype)
        return replace(common, **override)

    def _budget(self, weights: list[Sensitivity]) -> Budget:
        if self.budget_kl is not None:
            return Budget(kl=self.budget_kl)
        if self.budget_bytes is not None:
            return Budget(bytes=self.budget_bytes)
        if self.budget_bits is not None:
            return Budget(bytes=int(self.budget_bits * sum(map(elements_of, weights)) / 8))
        uniform = self._uniform()
        return Budget(bytes=sum(stored_bytes(*weight.shape, uniform, self.count) for weight in weights))

    def _facts(self, assignment: Assignment, budget: Budget) -> dict[str, Any]:
        uniform = [
            {
                "bits": scheme.bits,
                "block_size": scheme.block_size,
                "bytes": sum(stored_bytes(*weight.shape, scheme, self.count) for weight in assignment.weights),
                "kl": sum(weight.kl[scheme] for weight in assignment.weights),
            }
            for scheme in self._schemes()
        ]
        limit = {"bytes": budget.bytes} if budget.kl is None else {"kl": budget.kl}
        return {"options": str(self), "budget": limit, **assignment.facts(), "uniform": uniform}
