"""Assignment of a scheme to each weight: an exact knapsack over losses and stored bytes, and its explanation.

The loss of an assignment is the sum of the losses of each weight alone, which assumes that errors of different layers
are independent; docs/log.md compares predicted and measured losses. Weights that engines pack into one matmul get one
scheme, packed or not, so that an export loads where they are packed.

The bytes that a weight takes are computed without quantizing it, and counted as one of

    native         the artifact's for Ingot's own engine: tiles of 16 rows (programs/cpu_program.py), codes in their own
                   bits, scales in the scheme's type, a byte for each zero point; an unquantized weight keeps its type
    onnxruntime    the artifact's for onnxruntime: codes in a container (3 bits in 4, whole blocks), scales in float32,
                   zero points in the container's bits; an unquantized weight is widened to float32 (nbits_packing.py)
    nominal        those of GPTQ and compressed-tensors files: codes and zero points in their own bits, scales in
                   float16; an unquantized weight keeps its type
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import onnx_ir as ir

from ingot.artifact.programs.operation_row import Matrix
from ingot.errors import PassError
from ingot.passes.fusion.pack_projections import PACKS
from ingot.passes.lowering.nbits_packing import container_bits, engine_block_size
from ingot.passes.numerics.knapsack import best_choice, cheapest
from ingot.passes.numerics.scheme import Scheme
from ingot.passes.quantization.sensitivity import Sensitivity

Count = Literal["native", "onnxruntime", "nominal"]

_ENGINE_SCALE_BYTES, _NOMINAL_SCALE_BYTES, _FLOAT_BYTES = 4, 2, 4
Row = dict[str, Any]


def stored_bytes(rows: int, columns: int, scheme: Scheme, count: Count) -> int:
    """Bytes of the codes, scales and zero points of a quantized weight [rows, columns]."""
    if count == "nominal":
        blocks = scheme.num_blocks(columns)
        zero_points = 0 if scheme.symmetric else _bytes_of(rows * blocks, scheme.bits)
        return _bytes_of(rows * columns, scheme.bits) + rows * blocks * _NOMINAL_SCALE_BYTES + zero_points
    if count == "native":
        scale_bytes: Literal[2, 4] = 2 if scheme.scale_dtype == "float16" else 4
        matrix = Matrix.of_integers(rows, columns, scheme.bits, scheme.block_size, scale_bytes)
        return matrix.model_copy(update={"has_zeros": not scheme.symmetric}).num_bytes
    size, bits = scheme.block_size or engine_block_size(columns), container_bits(scheme.bits)
    blocks = -(-columns // size)
    row = _bytes_of(blocks * size, bits) + blocks * _ENGINE_SCALE_BYTES
    return rows * (row + (0 if scheme.symmetric else _bytes_of(blocks, bits)))


def unquantized_bytes(tensor: ir.TensorProtocol, count: Count, is_table: bool) -> int:
    """Bytes of an unquantized weight. onnxruntime widens all but a table, whose rows are widened when they are read."""
    return tensor.size * _FLOAT_BYTES if count == "onnxruntime" and not is_table else tensor.nbytes


def _bytes_of(codes: int, bits: int) -> int:
    return -(-codes * bits // 8)


@dataclass(frozen=True)
class Candidate:
    """A weight under one scheme; None: unquantized."""

    scheme: Scheme | None
    bytes: int
    kl: float
    is_measured: bool

    def facts(self) -> Row:
        """The candidate as JSON."""
        bits = 16 if self.scheme is None else self.scheme.bits
        block = {} if self.scheme is None else {"block_size": self.scheme.block_size}
        return {"bits": bits, **block, "bytes": self.bytes, "kl": self.kl, "measured": self.is_measured}


@dataclass(frozen=True)
class Budget:
    """The limit of an assignment: bytes, or KL in nats per token; one of the two."""

    bytes: int | None = None
    kl: float | None = None


@dataclass(frozen=True)
class Assignment:
    """Each weight with its candidates, and the index of the chosen one."""

    weights: Sequence[Sensitivity]
    candidates: Sequence[Sequence[Candidate]]
    chosen: tuple[int, ...]

    @property
    def picked(self) -> list[Candidate]:
        """The chosen candidates, in order."""
        return [candidates[at] for candidates, at in zip(self.candidates, self.chosen, strict=True)]

    @property
    def bytes(self) -> int:
        """Total bytes."""
        return sum(candidate.bytes for candidate in self.picked)

    @property
    def kl(self) -> float:
        """Predicted KL: the sum over weights."""
        return sum(candidate.kl for candidate in self.picked)

    def facts(self) -> Row:
        """The assignment as JSON: totals, and each weight's scheme, cost and alternatives."""
        rows = zip(self.weights, self.picked, self.candidates, strict=True)
        return {
            "bytes": self.bytes,
            "bits_per_weight": 8 * self.bytes / sum(elements_of(weight) for weight in self.weights),
            "predicted_kl": self.kl,
            "weights": [
                {"name": weight.name, "shape": list(weight.shape), **picked.facts(), "alternatives": _facts(others)}
                for weight, picked, others in rows
            ],
        }


def _facts(candidates: Sequence[Candidate]) -> list[Row]:
    return [candidate.facts() for candidate in candidates]


def elements_of(weight: Sensitivity) -> int:
    """Elements of a weight matrix."""
    rows, columns = weight.shape
    return rows * columns


def candidates_of(weight: Sensitivity, count: Count, may_stay: bool) -> list[Candidate]:
    """The measured schemes, and the unquantized weight where that is allowed."""
    found = [
        Candidate(scheme, stored_bytes(*weight.shape, scheme, count), kl, scheme in weight.measured)
        for scheme, kl in weight.kl.items()
    ]
    if may_stay:
        tensor = weight.sites[0].weight.const_value
        assert tensor is not None, "the manager verifies that initializers hold tensors"
        is_table = all(site.role == "embedding" for site in weight.sites)
        found.append(Candidate(None, unquantized_bytes(tensor, count, is_table), 0.0, is_measured=True))
    return found


def assign(weights: Sequence[Sensitivity], budget: Budget, count: Count, may_stay: bool) -> Assignment:
    """Find the assignment with the least KL within the budget's bytes, or the fewest bytes within its KL.

    Raises PassError with the smallest reachable bytes or KL when no assignment meets the budget.
    """
    candidates = [candidates_of(weight, count, may_stay) for weight in weights]
    groups = together(weights)
    items = [_options([candidates[at] for at in group], budget) for group in groups]
    limit = budget.kl if budget.bytes is None else float(budget.bytes)
    assert limit is not None, "a budget has one limit"
    chosen = best_choice(items, limit)
    if chosen is None:
        raise PassError(_out_of_reach(cheapest(items), budget, sum(map(elements_of, weights))))
    of_weight = {at: option for group, option in zip(groups, chosen, strict=True) for at in group}
    return Assignment(weights, candidates, tuple(of_weight[at] for at in range(len(weights))))


def together(weights: Sequence[Sensitivity]) -> list[list[int]]:
    """Indices of the weights that share a scheme: those that engines pack into one matmul; each other weight alone.

    They are recognized by name, as in pack-projections: q, k and v of one module, gate and up of one module.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for at, weight in enumerate(weights):
        parent, _, name = weight.name.rpartition(".")
        pack = next((pack for pack, names in PACKS.items() if name in names), name)
        groups.setdefault((parent, pack), []).append(at)
    return list(groups.values())


def _options(members: Sequence[Sequence[Candidate]], budget: Budget) -> list[tuple[float, float]]:
    """Cost and loss of a group under each scheme, in the order that the budget limits."""
    sums = [(sum(c.bytes for c in one), sum(c.kl for c in one)) for one in zip(*members, strict=True)]
    return [(float(size), kl) if budget.bytes is not None else (kl, float(size)) for size, kl in sums]


def _out_of_reach(least: float, budget: Budget, elements: int) -> str:
    if budget.bytes is None:
        return (
            f"the least KL that these schemes reach is {least:.3g}, the budget is {budget.kl:.3g}; raise budget_kl, "
            "or add more bits or smaller blocks to `bits` and `block_sizes` (16 bits lose nothing)"
        )
    return (
        f"the smallest size that these schemes reach is {int(least):,} bytes ({8 * least / elements:.2f} bits per "
        f"weight), the budget is {budget.bytes:,} ({8 * budget.bytes / elements:.2f}); raise the budget, or add fewer "
        "bits or larger blocks to `bits` and `block_sizes`"
    )


def assignment_table(facts: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Rows of the printed table: a header, one row per weight, a total. KL in nats per token, each weight alone."""
    rows: list[tuple[str, ...]] = [("weight", "bits", "block", "KB", "KL alone", "one step coarser", "one step finer")]
    for row in facts["weights"]:
        block = str(row["block_size"] or "channel") if "block_size" in row else ""
        size = f"{row['bytes'] / 1e3:.1f}"
        rows.append((row["name"], str(row["bits"]), block, size, f"{row['kl']:.2g}", *_neighbours(row)))
    bits, size = f"{facts['bits_per_weight']:.2f}", f"{facts['bytes'] / 1e3:.1f}"
    rows.append(("total", bits, "", size, f"{facts['predicted_kl']:.3g}", "", ""))
    return rows


def _neighbours(row: Mapping[str, Any]) -> tuple[str, str]:
    """The next smaller and the next larger alternative, of those that trade KL for bytes."""
    useful = [one for one in row["alternatives"] if not any(_is_better(other, one) for other in row["alternatives"])]
    smaller = max((one for one in useful if one["bytes"] < row["bytes"]), key=lambda one: one["bytes"], default=None)
    larger = min((one for one in useful if one["bytes"] > row["bytes"]), key=lambda one: one["bytes"], default=None)
    return _shown(smaller), _shown(larger)


def _is_better(other: Mapping[str, Any], one: Mapping[str, Any]) -> bool:
    dominates = other["bytes"] <= one["bytes"] and other["kl"] <= one["kl"]
    return bool(dominates and (other["bytes"], other["kl"]) != (one["bytes"], one["kl"]))


def _shown(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    block = f"/{row['block_size'] or 'channel'}" if "block_size" in row else ""
    return f"{row['bits']}{block}: {row['bytes'] / 1e3:.1f} KB, {row['kl']:.2g}"
