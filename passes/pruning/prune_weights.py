"""The pass prune-weights: sets the weights to zero that matter least on calibration data; shapes stay.

    Matched         Gemm(x, W, b?, transB=1)
    Replacement     Gemm(x, W', b?, transB=1)      a share of W' is zero, or m - n of each m neighbours (2:4)

The choice and the compensation are SparseGPT (arXiv:2301.00774) or Wanda (arXiv:2306.11695), see numerics/pruning.py.
Layers are pruned in the order in which they run, each on the output of those already pruned. The embedding table, the
head, and weights that several layers share are left alone.

Zeros stay zeros through a later quantize-weights or gptq, symmetric or not: zero has an exact code, which gptq gives to
no other weight. awq scales columns and keeps them too. rotate mixes columns, so it comes before.

When it pays: on engines with kernels for sparse weights, which read the exports. onnxruntime has none, so a pruned
model is as large and as fast as before. The model's metadata "ingot.prune-weights" is the JSON
{weights: [{name, method, sparsity, pattern, output_error}, ...]}, with the error relative to the layer's outputs.

Refuses: widths that m does not divide; inputs that are zero on all data or not finite; quantized weights. The weights
that it changes become float32 and stay in memory until the program is written.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError, UsageError, shown
from ingot.options import Range
from ingot.passes.base import DAMPING, Pass, PassKind
from ingot.passes.calibration import Arrays, CalibrationStage, LinearGroup, report_kept, require_calibration
from ingot.passes.model_facts import record_weights
from ingot.passes.numerics.arrays import Float32Array, Float64Array
from ingot.passes.numerics.gptq_rounding import damped_gram
from ingot.passes.numerics.pruning import Sparsity, relative_output_error, sparse_gpt, wanda
from ingot.passes.pruned_facts import MASKS_FACTS
from ingot.passes.rewriting import require_plain_gemm
from ingot.passes.weights import (
    WeightSite,
    change_stored,
    float32_values,
    readers,
    require_matches,
    stored_value,
    weight_sites,
)
from ingot.progress import report_progress

_log = logging.getLogger("ingot.passes")


@dataclass(frozen=True)
class PruneWeights(Pass):
    """Options:

    method      sparsegpt: the other weights compensate; wanda: they are unchanged, which is faster
    sparsity    share of zeros, or a pattern such as "2:4": two of each four neighbours are not zero
    leave       patterns (fnmatch) of layers to leave alone, by module path or tensor name
    damping     share of the mean diagonal of X^T X that is added to it (sparsegpt)
    """

    name: ClassVar[str] = "prune-weights"
    kind: ClassVar[PassKind] = "pruning"
    summary: ClassVar[str] = "Sets weights to zero that matter least on calibration data: a share, or all but n of m."
    needs_calibration: ClassVar[bool] = True

    method: Literal["sparsegpt", "wanda"] = "sparsegpt"
    sparsity: Annotated[float, Range(gt=0, lt=1)] | str = 0.5
    leave: tuple[str, ...] = field(default=())
    damping: Annotated[float, DAMPING] = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self._parse_sparsity()

    def requires(self, model: ir.Model) -> None:
        """Every Gemm is x @ W.T + b, every pattern matches a module, and m divides every width."""
        sites = weight_sites(model)
        for site in sites:
            require_plain_gemm(site.node)
        require_matches(sites, "leave", self.leave)
        for site in self._sites(sites):
            self._check(site)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Prune layer by layer."""
        calibration = require_calibration(self.name)
        wanted = {site.node: site for site in self._sites(weight_sites(model))}
        statistics: list[dict[str, object]] = []
        for stage in calibration.stages(model):
            recorded, made = stage.recorded(), dict[str, NDArray[Any]]()
            for group in stage.groups:
                for node, pruned, error in self._prune(stage, group, wanted, recorded):
                    made |= {f"{node.name}:weight": pruned, f"{node.name}:error": np.array(error)}
                    change_stored(model.graph, wanted[node].weight, _Replaced(pruned), approximates=True)
                    report_kept(self.name, node.name or "", int(np.count_nonzero(pruned)), pruned.size, error)
                    statistics.append(self._statistics(node, pruned, error))
            if recorded is None:
                stage.record(made)
            report_progress(self.name, len(statistics), len(wanted))
        if not statistics:
            return ir.passes.PassResult(model, modified=False)
        calibration.facts.record(model)
        record_weights(model, MASKS_FACTS, statistics)
        return ir.passes.PassResult(model, modified=True)

    def _prune(
        self, stage: CalibrationStage, group: LinearGroup, wanted: Mapping[ir.Node, WeightSite], recorded: Arrays | None
    ) -> Iterator[tuple[ir.Node, Float32Array, float]]:
        """The pruned weight of each of the group's layers, and the error of its outputs."""
        nodes = [node for node in group.linears if node in wanted]
        if recorded is not None:
            for node in nodes:
                yield node, recorded[f"{node.name}:weight"], float(recorded[f"{node.name}:error"])
            return
        if not nodes:
            return
        gram = stage.gram(group.source)
        prune = self._pruner(nodes[0], gram)
        for node in nodes:
            weight = float32_values(wanted[node].weight)
            pruned = prune(weight)
            yield node, pruned, relative_output_error(weight, weight - pruned, gram)

    def _pruner(self, node: ir.Node, gram: Float64Array) -> Callable[[Float32Array], Float32Array]:
        """A function that prunes weights of layers with this X^T X, which is factored once."""
        if not gram.any():
            raise PassError(
                f"layer {node.name!r} gets inputs that are zero on all of the calibration data; use another text, or "
                f"exclude the layer with leave: [{node.name!r}]"
            )
        if self.method == "wanda":
            norms = np.sqrt(np.diagonal(gram)).astype(np.float32)
            return lambda weight: wanda(weight, norms, self._parse_sparsity())
        try:
            damped = damped_gram(gram, self.damping, act_order=False)
        except ValueError as error:
            raise PassError(f"layer {node.name!r} gets {error}; use another calibration text") from error
        return lambda weight: sparse_gpt(weight, damped, self._parse_sparsity())

    def _statistics(self, node: ir.Node, pruned: Float32Array, error: float) -> dict[str, object]:
        return {
            "name": node.name,
            "method": self.method,
            "sparsity": float(np.mean(pruned == 0)),
            "pattern": self.sparsity if isinstance(self.sparsity, str) else None,
            "output_error": error,
        }

    def _sites(self, sites: Iterable[WeightSite]) -> list[WeightSite]:
        """Linear layers to prune; a weight with other readers is left alone, and the log says so."""
        found = []
        for site in sites:
            if site.role != "linear" or site.matches(self.leave):
                continue
            if not site.is_quantized and len(readers(site.weight)) > 1:
                _log.info("%s: left alone: node %r has a weight that others read too", self.name, site.node.name)
                continue
            found.append(site)
        return found

    def _check(self, site: WeightSite) -> None:
        if stored_value(site.operand) is None:
            raise PassError(f"layer {site.node.name!r} has a weight that is quantized; prune before quantizing")
        sparsity, shape = self._parse_sparsity(), site.weight.shape
        assert shape is not None
        columns = int(str(shape[1]))
        if sparsity.of and columns % sparsity.of:
            raise PassError(
                f"layer {site.node.name!r} has {columns} inputs, which {self.sparsity} does not divide; use another "
                f"pattern or a share, or exclude the layer with leave: [{site.node.name!r}]"
            )

    def _parse_sparsity(self) -> Sparsity:
        """The option sparsity, parsed; UsageError for a bad value."""
        if isinstance(self.sparsity, float):
            return Sparsity(self.sparsity)
        pattern = re.fullmatch(r"(\d{1,3}):(\d{1,3})", self.sparsity, re.ASCII)
        if pattern and 0 < int(pattern[1]) < int(pattern[2]):
            kept, of = int(pattern[1]), int(pattern[2])
            return Sparsity(1 - kept / of, kept, of)
        raise UsageError(
            f"{self.name}: sparsity is {shown(self.sparsity)}; allowed: a share above 0 and below 1, or a quoted "
            'pattern n:m with n below m, such as "2:4"'
        )


@dataclass(frozen=True)
class _Replaced:
    """A change of a stored weight to the pruned one."""

    pruned: Float32Array

    def __call__(self, values: NDArray[Any]) -> Float32Array:
        return self.pruned
