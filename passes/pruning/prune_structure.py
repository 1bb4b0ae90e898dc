"""The pass prune-structure: takes out feed-forward neurons, KV groups and whole layers, and makes the shapes smaller.

    layers       those whose output is nearest to their input go: block influence 1 - cos(input, output), the mean over
                 calibration tokens (Men et al., ShortGPT, arXiv:2403.03853)
    kv_groups    a KV head with the query heads that share it: rows of q, k, v, columns of o; as many in each layer
    ffn          neurons: rows of gate and up, columns of down; as many in each feed-forward

Groups and neurons are chosen for each o and each down by what their output loses on calibration data, with the others
making up for it; their weights are then the least squares fit (channel_selection.py). Layers are taken in the order in
which they run, each fed by those before as they are by then.

A feed-forward is any product of linear layers' results that linear layers alone read; there may be several to a layer.
Model facts, KV geometry, the attentions' attributes and their layer numbers follow. The model's metadata
"ingot.prune-structure" has as JSON what pruned_facts.StructureFacts says.

Run it before quantize-weights, gptq, awq and fuse-residual-norm, in front of or behind pack-projections. What it
changes is float32, and refitted weights stay in memory until the program is written.

Refuses: more layers, groups or neurons than there are; norms over all heads at once (OLMo 2) for kv_groups; weights
that are shared or quantized.

Inputs that linear layers lose: where that can be, and the weights while the walk goes on and when it is over.

Options that say how much stays: "all", a share above 0 and up to 1, or a number.
"""

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ingot.errors import PassError, UsageError
from ingot.passes.base import Pass, PassKind
from ingot.passes.calibration import Arrays, Calibration, CalibrationStage, LinearGroup, require_calibration
from ingot.passes.progress import report_kept
from ingot.passes.pruned_facts import record_structure, refuse_to_fill_zeros
from ingot.passes.pruning.channel_selection import (
    ELEMENTWISE,
    Array,
    ChannelSelection,
    Integers,
    KeptColumns,
    keep_columns,
)
from ingot.passes.pruning.residual_layers import block_influence, drop_layers, residual_layers
from ingot.passes.rewriting import require_plain_gemm
from ingot.passes.weights import change_stored, float32_values, readers, stored_value, weight_sites
from ingot.progress import note, report_progress

Kept = Literal["all"] | int | float


def check_kept(owner: str, option: str, value: Kept) -> None:
    """UsageError unless it is "all", a share or a number of 1 or more."""
    is_number = isinstance(value, int) and value >= 1
    if value != "all" and not is_number and not (isinstance(value, float) and 0 < value <= 1):
        raise UsageError(
            f'{owner}: {option} is {value}; allowed: "all", a share above 0 and up to 1.0 (0.75), or a whole number'
        )


def kept_count(option: str, value: Kept, total: int, what: str, multiple: int = 1) -> int:
    """How many of `total` stay; a share is rounded to a multiple, at least one. PassError for more than there are."""
    if value == "all":
        return total
    if isinstance(value, int):
        if value > total:
            raise PassError(f"{option} is {value}, but {what} {total}; set {option} to that or less, or to a share")
        return value
    return min(total, max(multiple, round(float(value) * total / multiple) * multiple))


SiteKind = Literal["kv_groups", "ffn"]
FloatArray = NDArray[np.float32]
_HEADS = ("num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True)
class Cut:
    """A decision: the layers that read one value, what they keep of it, and what goes from what makes it."""

    group: LinearGroup
    kept: KeptColumns
    selection: ChannelSelection


def site_of(group: LinearGroup) -> tuple[SiteKind | None, int]:
    """What the linear layers of a group read, and how many columns belong together."""
    producer = group.source.producer()
    if producer is not None and producer.op_type == "PagedAttention":
        heads, kv_heads, dim = (producer.attributes.get_int(name, 0) or 0 for name in _HEADS)
        return "kv_groups", heads // kv_heads * dim
    if producer is not None and producer.op_type in ELEMENTWISE:
        return "ffn", 1
    return None, 1


def own_weight(node: ir.Node) -> FloatArray:
    """A layer's weight [out, in]; PassError where it is quantized, or read by others, which would lose inputs, too."""
    stored = stored_value(node.inputs[1])
    if stored is None:
        raise PassError(f"layer {node.name!r} has a weight that is computed or quantized; prune before")
    if len(readers(stored)) > 1:
        raise PassError(f"layer {node.name!r} shares {stored.name!r} with others, which would lose inputs, too")
    return float32_values(stored)


def _parts(cut: Cut) -> Iterator[tuple[ir.Value, FloatArray]]:
    """The weights of a cut's layers, and what they become."""
    row = 0
    for node in cut.group.linears:
        stored = stored_value(node.inputs[1])
        assert stored is not None
        assert stored.shape is not None
        rows = int(str(stored.shape[0]))
        yield stored, cut.kept.weight[row : row + rows]
        row += rows


def zero_columns(graph: ir.Graph, cut: Cut) -> None:
    """The kept weights among zeros, in the old shape: what the rest of the walk computes with."""
    for stored, kept in _parts(cut):
        change_stored(graph, stored, partial(_widened, kept=kept, columns=cut.kept.columns))


def _widened(values: FloatArray, kept: FloatArray, columns: Integers) -> FloatArray:
    result = np.zeros_like(values)
    result[:, columns] = kept
    return result


def put_weights(cut: Cut) -> None:
    """The kept weights alone, in the new shape; what makes the inputs must lose its rows then."""
    for stored, kept in _parts(cut):
        stored.const_value = ir.Tensor(np.ascontiguousarray(kept), name=stored.name)
        stored.shape = ir.Shape(kept.shape)


_log = logging.getLogger("ingot.passes")


@dataclass(frozen=True)
class Site:
    """What was kept of the inputs of the linear layers that read one value."""

    name: str
    kind: SiteKind
    kept: int
    of: int
    output_error: float


@dataclass(frozen=True)
class PruneStructure(Pass):
    """Options:

    ffn          neurons to keep in each feed-forward: "all", a share (0.75), or a number (576)
    kv_groups    KV heads to keep in each layer, with the query heads that share them: likewise
    layers       layers to keep: likewise
    multiple     a share of neurons is rounded to a multiple of this
    refit        fit the weights that stay to the outputs; else they stay as they are
    damping      share of the mean diagonal of X^T X that is added to it for the fit
    tokens       calibration tokens on which the layers' influence is measured, in whole sequences
    """

    name: ClassVar[str] = "prune-structure"
    kind: ClassVar[PassKind] = "pruning"
    summary: ClassVar[str] = "Takes out feed-forward neurons, KV groups and layers that calibration data misses least."
    needs_calibration: ClassVar[bool] = True

    ffn: Kept = "all"
    kv_groups: Kept = "all"
    layers: Kept = "all"
    multiple: int = 32
    refit: bool = True
    damping: float = 0.01
    tokens: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("ffn", "kv_groups", "layers"):
            check_kept(self.name, option, getattr(self, option))
        for option in ("multiple", "tokens"):
            if getattr(self, option) < 1:
                raise UsageError(f"{self.name}: {option} is {getattr(self, option)}; allowed: 1 or more")
        if not 0 < self.damping <= 1:
            raise UsageError(f"{self.name}: damping is {self.damping}; allowed: above 0, up to 1 (0.01 is usual)")

    def requires(self, model: ir.Model) -> None:
        """Something is to be taken out, and every Gemm is x @ W.T + b."""
        if (self.ffn, self.kv_groups, self.layers) == ("all", "all", "all"):
            raise PassError('ffn, kv_groups and layers are all "all"; set what is to be taken out, say ffn: 0.75')
        if self.refit:
            refuse_to_fill_zeros(model)
        for site in weight_sites(model):
            require_plain_gemm(site.node)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """First layers, then what the others can spare."""
        calibration = require_calibration(self.name)
        before = _elements(model)
        kept, influence = self._prune_layers(model, calibration)
        sites: list[Site] = []
        if self.ffn != "all" or self.kv_groups != "all":
            sites = self._prune_columns(model, calibration)
        removed = before - _elements(model)
        calibration.facts.record(model)
        note(f"{self.name}: {removed} of {before} parameters went; layers {kept} stay")
        record_structure(model, kept, influence, [asdict(site) for site in sites], removed)
        return ir.passes.PassResult(model, modified=True)

    def _prune_layers(self, model: ir.Model, calibration: Calibration) -> tuple[list[int], list[float]]:
        """Numbers of the layers that stay, and the influence of all, where it was asked for."""
        if self.layers == "all":
            return list(range(sum(node.op_type == "PagedAttention" for node in model.graph))), []
        layers = residual_layers(model.graph)
        count = kept_count("layers", self.layers, len(layers), "the model's layers are")
        if count == len(layers):
            raise PassError(f"layers is {self.layers}, which keeps all {count}; set it to less")
        report = partial(report_progress, self.name, total=len(layers))
        influence = block_influence(model, layers, calibration, self.tokens, report)
        kept = sorted(np.argsort(-np.array(influence), kind="stable")[:count].tolist())
        gone = sorted(set(range(len(layers))) - set(kept))
        _log.info("%s: layers %s go; influence %s", self.name, gone, [round(value, 4) for value in influence])
        drop_layers(model.graph, layers, kept)
        return kept, influence

    def _prune_columns(self, model: ir.Model, calibration: Calibration) -> list[Site]:
        """Decide site by site, pruned columns being zeros until the walk is over; then make everything smaller."""
        cuts: list[Cut] = []
        sites: list[Site] = []
        total, done = sum(site.node.op_type == "Gemm" for site in weight_sites(model)), 0
        for stage in calibration.stages(model):
            known, made = stage.recorded(), dict[str, NDArray[Any]]()
            for group in stage.groups:
                for site, cut in self._decide(stage, group, known):
                    report_kept(self.name, site.name, site.kept, site.of, site.output_error)
                    sites.append(site)
                    cuts.append(cut)
                    zero_columns(model.graph, cut)
                    made |= cut.kept.arrays(site.name)
            if known is None:
                stage.record(made)
            done += sum(len(group.linears) for group in stage.groups)
            report_progress(self.name, done, total)
        if not sites:
            raise PassError("nothing in the model looks like a feed-forward or an attention behind a linear layer")
        for cut in cuts:
            put_weights(cut)
        for cut in cuts:
            cut.selection.apply(model.graph)
        return sites

    def _decide(self, stage: CalibrationStage, group: LinearGroup, known: Arrays | None) -> Iterator[tuple[Site, Cut]]:
        """What stays of the inputs of a group's layers; nothing for a group that is no site or stays whole."""
        kind, unit = site_of(group)
        wanted = {"kv_groups": self.kv_groups, "ffn": self.ffn, None: "all"}[kind]
        if kind is None or wanted == "all":
            return
        weight = np.concatenate([own_weight(node) for node in group.linears]).astype(np.float64)
        units, name = weight.shape[1] // unit, group.linears[0].name or ""
        what, multiple = ("KV heads of", 1) if kind == "kv_groups" else ("inputs of", self.multiple)
        count = kept_count(kind, wanted, units, f"the {what} {name!r} are", multiple)
        if count == units:
            raise PassError(f"{kind} is {wanted}, which keeps all {units} of {name!r}; set it to less")
        kept = KeptColumns.of(known, name) if known is not None else self._keep(stage, group, weight, unit, count)
        selection = ChannelSelection()
        selection.select(group.source, kept.columns, group.linears)
        yield Site(name, kind, count, units, kept.output_error), Cut(group, kept, selection)

    def _keep(self, stage: CalibrationStage, group: LinearGroup, weight: Array, unit: int, count: int) -> KeptColumns:
        try:
            return keep_columns(weight, stage.gram(group.source), unit, count, refit=self.refit, damping=self.damping)
        except ValueError as error:
            raise PassError(
                f"{group.source.name!r} gives its linear layers {error}; give other calibration text"
            ) from error


def _elements(model: ir.Model) -> int:
    """Elements of all weights and biases: floating-point initializers but for scalars and rotary tables."""
    tensors = [value.const_value for value in model.graph.initializers.values() if not _is_table(value)]
    return sum(t.size for t in tensors if t is not None and t.size > 1 and t.dtype.is_floating_point())


def _is_table(value: ir.Value) -> bool:
    return any(node.op_type == "RotaryEmbedding" for node in value.consumers())
