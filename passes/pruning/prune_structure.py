"""The pass prune-structure: removes feed-forward neurons, KV groups and whole layers, and shrinks the shapes.

    Matched         Gemm(Mul(act(gate), up), W)                    gate, up = Gemm(x, ..): one feed-forward
                    Gemm(PagedAttention(q, k, v), O)               one attention
                    h' = h + branches of one layer                 see residual_layers.py

    Replacement     ffn          the same with fewer neurons: rows of gate and up, columns of W
                    kv_groups    with fewer KV heads and the query heads that share them: rows of q, k, v, columns of O
                    layers       h' = h

    ffn, kv_groups  as many for each feed-forward or attention. What goes is what costs its output least on calibration
                    data when the rest compensates; the other weights become the least squares fit (numerics/pruning.py)
    layers          those whose output is nearest to their input: block influence 1 - cos(input, output), the mean over
                    calibration tokens (Men et al., ShortGPT, arXiv:2403.03853)

Layers are pruned in the order in which they run, each on the output of those already pruned. A feed-forward is any
elementwise function of linear layers' results that only linear layers read; a layer may have several. Model facts, KV
geometry, the attentions' attributes and layer numbers follow. The model's metadata "ingot.prune-structure" is the JSON
of StructureFacts (pruned_facts.py).

Run it before quantize-weights, gptq, awq and fuse-residual-norm, before or after pack-projections. The weights that it
changes become float32; fitted ones stay in memory until the program is written.

Refuses: to keep more than there is, or everything; norms over all heads at once (OLMo 2) for kv_groups; weights that
are shared or quantized.
"""

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError
from ingot.options import Range
from ingot.passes.base import DAMPING, TOKENS, Pass, PassKind
from ingot.passes.calibration import (
    Arrays,
    Calibration,
    CalibrationStage,
    LinearGroup,
    report_kept,
    require_calibration,
)
from ingot.passes.numerics.arrays import Float32Array, Float64Array
from ingot.passes.numerics.pruning import Integers, KeptColumns, keep_columns
from ingot.passes.pruned_facts import record_structure, refuse_to_fill_zeros
from ingot.passes.pruning.channel_selection import ELEMENTWISE, ChannelSelection
from ingot.passes.pruning.residual_layers import block_influence, drop_layers, residual_layers
from ingot.passes.rewriting import attentions, head_counts, require_plain_gemm
from ingot.passes.weights import change_stored, float32_values, readers, stored_value, weight_sites
from ingot.progress import note, report_progress

Kept = Literal["all"] | Annotated[int, Range(ge=1, le=1 << 24)] | Annotated[float, Range(gt=0, le=1)]
SiteKind = Literal["kv_groups", "ffn"]
_log = logging.getLogger("ingot.passes")


@dataclass(frozen=True)
class Site:
    """Statistics of one cut: how many units were kept of the inputs of the linear layers that read one value."""

    name: str
    kind: SiteKind
    kept: int
    of: int
    output_error: float


@dataclass(frozen=True)
class Cut:
    """The linear layers that read one value, the columns that they keep, and the changes to the ops that make it."""

    group: LinearGroup
    kept: KeptColumns
    selection: ChannelSelection


@dataclass(frozen=True)
class PruneStructure(Pass):
    """Options:

    ffn          neurons to keep in each feed-forward: "all", a share (0.75), or a number (576)
    kv_groups    KV heads to keep in each attention, with the query heads that share them; values as for ffn
    layers       layers to keep; values as for ffn
    multiple     a share of neurons is rounded to a multiple of this
    refit        fit the kept weights to the outputs; else they are unchanged
    damping      share of the mean diagonal of X^T X that is added to it for the fit
    tokens       calibration tokens to measure the layers' influence on, in whole sequences
    """

    name: ClassVar[str] = "prune-structure"
    kind: ClassVar[PassKind] = "pruning"
    summary: ClassVar[str] = "Removes feed-forward neurons, KV groups and layers that matter least on calibration data."
    needs_calibration: ClassVar[bool] = True

    ffn: Kept = "all"
    kv_groups: Kept = "all"
    layers: Kept = "all"
    multiple: Annotated[int, Range(ge=1, le=65_536)] = 32
    refit: bool = True
    damping: Annotated[float, DAMPING] = 0.01
    tokens: Annotated[int, TOKENS] = 4096

    def requires(self, model: ir.Model) -> None:
        """Something is to be removed, and every Gemm is x @ W.T + b."""
        if (self.ffn, self.kv_groups, self.layers) == ("all", "all", "all"):
            raise PassError('ffn, kv_groups and layers are all "all"; set one of them, say ffn: 0.75')
        if self.refit:
            refuse_to_fill_zeros(model)
        for site in weight_sites(model):
            require_plain_gemm(site.node)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Remove layers first, then columns of the others."""
        calibration = require_calibration(self.name)
        before = _elements(model)
        kept, influence = self._prune_layers(model, calibration)
        sites: list[Site] = []
        if self.ffn != "all" or self.kv_groups != "all":
            sites = self._prune_columns(model, calibration)
        removed = before - _elements(model)
        calibration.facts.record(model)
        note(f"{self.name}: removed {removed} of {before} parameters; kept layers {kept}")
        record_structure(model, kept, influence, [asdict(site) for site in sites], removed)
        return ir.passes.PassResult(model, modified=True)

    def _prune_layers(self, model: ir.Model, calibration: Calibration) -> tuple[list[int], list[float]]:
        """Remove layers; return the numbers of those kept, and the influence of all, if it was measured."""
        if self.layers == "all":
            return list(range(len(attentions(model.graph)))), []
        layers = residual_layers(model.graph)
        count = _kept_count("layers", self.layers, len(layers), "the number of layers is")
        if count == len(layers):
            raise PassError(f"layers is {self.layers}, which keeps all {count}; set it to less")
        report = partial(report_progress, self.name, total=len(layers))
        influence = block_influence(model, layers, calibration, self.tokens, report)
        kept = sorted(np.argsort(-np.array(influence), kind="stable")[:count].tolist())
        gone = sorted(set(range(len(layers))) - set(kept))
        _log.info("%s: removes layers %s; influence %s", self.name, gone, [round(value, 4) for value in influence])
        drop_layers(model.graph, layers, kept)
        return kept, influence

    def _prune_columns(self, model: ir.Model, calibration: Calibration) -> list[Site]:
        """Choose and zero columns group by group; after the last stage, shrink all weights and shapes."""
        cuts: list[Cut] = []
        sites: list[Site] = []
        total, done = sum(site.node.op_type == "Gemm" for site in weight_sites(model)), 0
        for stage in calibration.stages(model):
            recorded, made = stage.recorded(), dict[str, NDArray[Any]]()
            for group in stage.groups:
                for site, cut in self._decide(stage, group, recorded):
                    report_kept(self.name, site.name, site.kept, site.of, site.output_error)
                    sites.append(site)
                    cuts.append(cut)
                    _zero_columns(model.graph, cut)
                    made |= cut.kept.arrays(site.name)
            if recorded is None:
                stage.record(made)
            done += sum(len(group.linears) for group in stage.groups)
            report_progress(self.name, done, total)
        if not sites:
            raise PassError("the model has no feed-forward or attention that a linear layer reads")
        for cut in cuts:
            _shrink_weights(cut)
        for cut in cuts:
            cut.selection.apply(model.graph)
        return sites

    def _decide(
        self, stage: CalibrationStage, group: LinearGroup, recorded: Arrays | None
    ) -> Iterator[tuple[Site, Cut]]:
        """Choose the inputs that a group's layers keep; yield nothing for a group that is not pruned."""
        kind, unit = _kind_and_unit(group)
        wanted = {"kv_groups": self.kv_groups, "ffn": self.ffn, None: "all"}[kind]
        if kind is None or wanted == "all":
            return
        weight = np.concatenate([_own_weight(node) for node in group.linears]).astype(np.float64)
        units, name = weight.shape[1] // unit, group.linears[0].name or ""
        what, multiple = ("KV heads", 1) if kind == "kv_groups" else ("inputs", self.multiple)
        count = _kept_count(kind, wanted, units, f"the number of {what} of {name!r} is", multiple)
        if count == units:
            raise PassError(f"{kind} is {wanted}, which keeps all {units} of {name!r}; set it to less")
        kept = KeptColumns.of(recorded, name) if recorded is not None else self._keep(stage, group, weight, unit, count)
        selection = ChannelSelection()
        selection.select(group.source, kept.columns, group.linears)
        yield Site(name, kind, count, units, kept.output_error), Cut(group, kept, selection)

    def _keep(
        self, stage: CalibrationStage, group: LinearGroup, weight: Float64Array, unit: int, count: int
    ) -> KeptColumns:
        try:
            return keep_columns(weight, stage.gram(group.source), unit, count, refit=self.refit, damping=self.damping)
        except ValueError as error:
            raise PassError(
                f"{group.source.name!r} gives its linear layers {error}; use another calibration text"
            ) from error


def _kept_count(option: str, value: Kept, total: int, what: str, multiple: int = 1) -> int:
    """Number to keep of `total`; a share is rounded to a multiple, at least one. PassError for a number above `total`.

    what    subject of the message, such as "the number of layers is"
    """
    if value == "all":
        return total
    if isinstance(value, int):
        if value > total:
            raise PassError(f"{option} is {value}, but {what} {total}; set {option} to that or less, or to a share")
        return value
    return min(total, max(multiple, round(float(value) * total / multiple) * multiple))


def _kind_and_unit(group: LinearGroup) -> tuple[SiteKind | None, int]:
    """The kind of a group's input, None where nothing is pruned, and how many columns form a unit."""
    producer = group.source.producer()
    if producer is not None and producer.op_type == "PagedAttention":
        heads, kv_heads, dim = head_counts(producer)
        return "kv_groups", heads // kv_heads * dim
    if producer is not None and producer.op_type in ELEMENTWISE:
        return "ffn", 1
    return None, 1


def _own_weight(node: ir.Node) -> Float32Array:
    """A layer's weight [out, in]; PassError if it is quantized, or shared with layers that would lose inputs."""
    stored = stored_value(node.inputs[1])
    if stored is None:
        raise PassError(
            f"layer {node.name!r} has a weight that is computed or quantized; put the pruning pass before the quantizer"
        )
    if len(readers(stored)) > 1:
        raise PassError(f"layer {node.name!r} shares {stored.name!r} with others, which would lose inputs too")
    return float32_values(stored)


def _kept_weights(cut: Cut) -> Iterator[tuple[ir.Value, Float32Array]]:
    """The weights of a cut's layers, with the columns that they keep."""
    row = 0
    for node in cut.group.linears:
        stored = stored_value(node.inputs[1])
        assert stored is not None
        assert stored.shape is not None
        rows = int(str(stored.shape[0]))
        yield stored, cut.kept.weight[row : row + rows]
        row += rows


def _zero_columns(graph: ir.Graph, cut: Cut) -> None:
    """Put the kept weights among zeros, in the old shape, for the rest of the walk over the stages."""
    for stored, kept in _kept_weights(cut):
        change_stored(graph, stored, partial(_widened, kept=kept, columns=cut.kept.columns))


def _widened(values: Float32Array, kept: Float32Array, columns: Integers) -> Float32Array:
    result = np.zeros_like(values)
    result[:, columns] = kept
    return result


def _shrink_weights(cut: Cut) -> None:
    """Leave only the kept weights, in the new shape; `ChannelSelection.apply` then shrinks the inputs."""
    for stored, kept in _kept_weights(cut):
        stored.const_value = ir.Tensor(np.ascontiguousarray(kept), name=stored.name)
        stored.shape = ir.Shape(kept.shape)


def _elements(model: ir.Model) -> int:
    """Elements of all weights and biases: floating-point initializers other than scalars and rotary tables."""
    tensors = [value.const_value for value in model.graph.initializers.values() if not _is_table(value)]
    return sum(t.size for t in tensors if t is not None and t.size > 1 and t.dtype.is_floating_point())


def _is_table(value: ir.Value) -> bool:
    return any(node.op_type == "RotaryEmbedding" for node in value.consumers())
