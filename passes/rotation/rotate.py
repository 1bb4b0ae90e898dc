"""The pass rotate: rotates the channels of the residual stream and of the values, so that no channel dominates.

    Matched         h = Gather(E, input_ids) + ... + Gemm(y, W, b?)         the residual stream
                    Gemm(RMSNormalization(h, g), V)                         each of its readers
                    Gemm(PagedAttention(q, k, v), O), v = Gemm(x, U, c?)    values of a head

    Replacement     h Q = Gather(E Q, input_ids) + ... + Gemm(y, Q^T W, b Q)
                    Gemm(RMSNormalization(h Q, 1), V diag(g) Q)
                    Gemm(PagedAttention(q, k, v R), O R), v R = Gemm(x, R^T U, c R)

Ashkboos et al., QuaRot, arXiv:2404.00456: those of its rotations that cost nothing when the model runs. Q and R are
orthogonal, a rotation keeps the RMS, and Q Q^T cancels, so the outputs stay. A channel that was far larger than the
others is spread over all of them, which reduces the error of later rounding. Each KV head of each layer has its own R.

The weight g of a norm is multiplied into the linear layers that read the norm, and becomes 1, unless all its elements
are equal. A head that shares the embedding's tensor then gets a tensor of its own, because g is between the stream and
the head and not between the ids and the stream; the log says how many bytes it adds. Rotated weights are lazy float32.

Run it after fold-constants and before awq, gptq or quantize-weights. The model's metadata "ingot.rotate" is the JSON
{matrix, seed, residual: channels or null, values: layers, separate_head: bytes, left_alone: [reason, ...]}.

Refuses: a model that is already rotated, or whose weights prune-weights made sparse. Parts that cannot be rotated
exactly are left alone with "auto", and the log says why; with true they are an error: norms after the layers (Gemma 2,
Gemma 3, OLMo 2), weights that are shared or quantized.
"""

import logging
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import onnx_ir as ir

from ingot.errors import PassError, UsageError
from ingot.passes.base import SEED, Pass, PassKind
from ingot.passes.calibration import LinearGroup
from ingot.passes.model_facts import Fact
from ingot.passes.numerics.hadamard import Matrix, make_rotation, of_heads, of_rows
from ingot.passes.pruned_facts import refuse_to_fill_zeros
from ingot.passes.quantization.channel_scaling import Fold, find_fold
from ingot.passes.rewriting import Refusal, attentions, require_plain_gemm
from ingot.passes.rotation.residual_stream import find_residual_stream, plan_turns, turn_stream
from ingot.passes.weights import change_stored, stored_value, weight_sites

ROTATE_FACTS: Fact[dict[str, Any]] = Fact("ingot.rotate", dict)  # see the module's docstring

_log = logging.getLogger("ingot.passes")


@dataclass
class _Done:
    """Facts for the metadata."""

    residual: int | None = None
    values: int = 0
    separate_head: int = 0
    left_alone: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RotateWeights(Pass):
    """Options:

    matrix      hadamard; random-hadamard: with random signs; orthogonal: random, of any size, slower to build
    seed        seed of the random matrices
    residual    rotate the residual stream: auto: where that is exact; true: an error where it is not; false: never
    values      rotate the values of each head: auto, true or false as for residual
    """

    name: ClassVar[str] = "rotate"
    kind: ClassVar[PassKind] = "quantization"
    summary: ClassVar[str] = "Rotates the residual stream and the values, so that quantization meets no large channels."
    keeps_schemes: ClassVar[bool] = True
    keeps_hidden_states: ClassVar[bool] = False

    matrix: Matrix = "random-hadamard"
    seed: Annotated[int, SEED] = 0
    residual: Literal["auto"] | bool = "auto"
    values: Literal["auto"] | bool = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.residual is False and self.values is False:
            raise UsageError(f"{self.name}: residual and values are both false; set one of them to auto or true")

    def requires(self, model: ir.Model) -> None:
        """The model is neither rotated nor sparse, and every Gemm is x @ W.T + b."""
        if ROTATE_FACTS.is_in(model):
            raise PassError("the model is already rotated, and a second rotation could undo the first; list it once")
        refuse_to_fill_zeros(model)
        for site in weight_sites(model):
            require_plain_gemm(site.node)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rotate the values of every attention, then the residual stream."""
        done = _Done()
        for node in attentions(model.graph) if self.values is not False else ():
            done.values += self._settle(self._rotate_values(model.graph, node), self.values, done)
        if self.residual is not False and self._settle(self._rotate_stream(model, done), self.residual, done):
            _log.info("%s: residual stream of %s channels rotated", self.name, done.residual)
        if not done.values and done.residual is None:
            raise PassError(f"nothing in the model can be rotated: {'; '.join(done.left_alone) or 'no attention'}")
        ROTATE_FACTS.record(model, {"matrix": self.matrix, "seed": self.seed, **vars(done)})
        return ir.passes.PassResult(model, modified=True)

    def _settle(self, refusal: Refusal | None, wanted: Literal["auto"] | bool, done: _Done) -> bool:
        """Return whether it was rotated. A refusal is an error if the option is true, else a warning in the log."""
        if refusal is None:
            return True
        if wanted is True:
            raise PassError(f"{refusal}; set residual or values to auto or false to leave it alone")
        _log.warning("%s: left alone: %s", self.name, refusal)
        done.left_alone.append(str(refusal))
        return False

    def _rotate_values(self, graph: ir.Graph, attention: ir.Node) -> Refusal | None:
        """Multiply R into the rows that make the values and the columns that read the attention's output."""
        output = attention.outputs[0]
        linears = tuple(node for node in output.consumers() if node.op_type == "Gemm")
        fold = find_fold(LinearGroup(output, linears)) if linears else Refusal(attention.name or "", "feeds no Gemm")
        if isinstance(fold, Refusal):
            return fold
        assert isinstance(fold, Fold), "an attention makes the group's input"
        assert fold.heads is not None
        assert fold.rows is not None
        kv_heads, group, dim = fold.heads
        seed = (self.seed, 1, attention.attributes.get_int("layer", 0) or 0)
        rotation = make_rotation(self.matrix, kv_heads, dim, seed)
        for operand in fold.node.inputs[1:]:
            change_stored(graph, _stored(operand), of_rows(rotation, fold.rows))
        for linear in linears:
            change_stored(graph, _stored(linear.inputs[1]), of_heads(rotation, group))
        return None

    def _rotate_stream(self, model: ir.Model, done: _Done) -> Refusal | None:
        """Multiply Q into every weight that writes or reads the stream, and norm weights into the norms' readers."""
        stream = find_residual_stream(model.graph)
        if isinstance(stream, Refusal):
            return stream
        turns = plan_turns(stream)
        if isinstance(turns, Refusal):
            return turns
        rotation = make_rotation(self.matrix, 1, stream.width, (self.seed, 0))
        done.separate_head = turn_stream(model.graph, stream, turns, rotation)
        done.residual = stream.width
        if done.separate_head:
            _log.info("%s: the head gets a tensor of its own, %d bytes in float32", self.name, done.separate_head)
        return None


def _stored(operand: ir.Value | None) -> ir.Value:
    stored = stored_value(operand)
    assert stored is not None, "find_fold checked it"
    return stored
