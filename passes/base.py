"""The base class of all passes: one rewrite of the IR, with typed options and facts that the rest of Ingot reads.

    @dataclass(frozen=True)
    class DropTwins(Pass):
        name: ClassVar[str] = "drop-twins"
        kind: ClassVar[PassKind] = "clean-up"
        summary: ClassVar[str] = "Removes the second of two equal nodes."

        max_bytes: int = 1024

        def call(self, model: ir.Model) -> ir.passes.PassResult: ...

A pass is a frozen dataclass whose fields are its options; `ingot.options` says how they are declared.
`str(DropTwins(max_bytes=8))` is `drop-twins: {max_bytes: 8}`, which can be pasted into a recipe; options at their
default are left out. docs/passes.md describes how to add a pass.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import onnx_ir as ir
import yaml

from ingot.artifact.kv_geometry import KVType
from ingot.errors import PassError
from ingot.options import Range, convert_option, options_of, plain_value

PassKind = Literal["clean-up", "fusion", "quantization", "pruning", "lowering"]
_LOSSY: tuple[PassKind, ...] = ("quantization", "pruning")


@dataclass(frozen=True)
class Pass(ir.passes.InPlacePass):
    """One rewrite of the IR, in place.

    `requires` and `ensures` raise PassError when the model before or after the pass breaks its conditions. `call`
    returns a PassResult with a truthful `modified`. An option of the wrong type raises UsageError on construction; a
    pass that limits its options further extends `__post_init__`.

    The properties below are facts about the pass. Ingot judges every pass by them, third parties' included, and never
    by its name. Override one with a ClassVar, or with a property where the answer depends on the options.
    """

    name: ClassVar[str]
    kind: ClassVar[PassKind]
    summary: ClassVar[str]

    @property
    def is_lossy(self) -> bool:
        """Whether outputs may change by more than float rounding: a baseline omits the pass, an export runs it."""
        return self.kind in _LOSSY

    @property
    def changes_weights(self) -> bool:
        """Whether it changes weights by more than rounding them: scales, rotates, prunes or tunes.

        Errors of rounded weights are measured against the weights before rounding, and against the checkpoint's own
        only where no pass of the recipe changes weights. By default true for every lossy pass.
        """
        return self.is_lossy

    @property
    def keeps_schemes(self) -> bool:
        """Whether it leaves in place what a checkpoint format has to store: shapes, bits, block sizes, activations.

        An export knows the schemes before calibration where every pass keeps them or is a `QuantizeWeights`, and then
        refuses a format that cannot hold them right away. By default false for every lossy pass.
        """
        return not self.is_lossy

    @property
    def assigns_schemes(self) -> bool:
        """Whether it only assigns bits and block sizes to weights, which a later pass rounds by."""
        return False

    @property
    def applies_schemes(self) -> bool:
        """Whether it rounds weights by the schemes that an earlier pass assigned."""
        return False

    @property
    def rounds_weights(self) -> Literal["none", "some", "all"]:
        """Part of the linear layers' weights that it rounds; after all are rounded, a later pass has none to round."""
        return "none"

    @property
    def keeps_hidden_states(self) -> bool:
        """Report whether the last layer's hidden state stays what a draft head of the checkpoint was trained to read.

        An artifact leaves out the head where a pass changes the basis of hidden states.
        """
        return True

    @property
    def needs_calibration(self) -> bool:
        """Whether it calls `require_calibration`, so that the recipe needs the section `calibration`."""
        return False

    @property
    def needs_float8(self) -> bool:
        """Whether the GPU has to compute with 8-bit floats (SM 89 or newer)."""
        return False

    @property
    def kv_precision(self) -> KVType | None:
        """Precision that it gives the KV cache, which the target must support; None leaves the cache unchanged."""
        return None

    @property
    def compares_generations(self) -> bool:
        """Whether evidence compares greedy generations by default: where `kv_precision` is coarser than float16.

        The loss of float16 is far below what 16 generations can show (docs/kv-cache.md); perplexity and KL cover it.
        """
        return self.kv_precision not in (None, "float32", "float16")

    @property
    def kv_group(self) -> int:
        """Dims of int4 keys or values that share a scale and a minimum; 0: one scale for a vector."""
        return 0

    def __post_init__(self) -> None:
        for option in options_of(type(self)).values():
            converted = convert_option(self.name, option.name, getattr(self, option.name), option.annotation)
            object.__setattr__(self, option.name, converted)  # frozen only from here on

    def __call__(self, model_or_result: ir.Model | ir.passes.PassResult, /) -> ir.passes.PassResult:
        """Run requires, call and ensures; a broken condition is a PassError that starts with the pass's name."""
        try:
            return super().__call__(model_or_result)
        except (ir.passes.InvariantError, ir.passes.PassError) as error:
            raise PassError(f"{self.name}: {error.__cause__ or error}") from error

    def requires(self, model: ir.Model) -> None:
        """Raise PassError when the model is not ready for this pass. By default every model is ready."""

    def ensures(self, model: ir.Model) -> None:
        """Raise PassError when the pass left the model in a state that it must not. By default nothing is checked."""

    def options(self) -> dict[str, object]:
        """Every option with its value, as plain data (lists and dicts) that YAML and JSON can hold."""
        return {name: plain_value(getattr(self, name)) for name in options_of(type(self))}

    def __str__(self) -> str:
        """The pass as one entry of a recipe's list: its name and the options that differ from their defaults."""
        declared = options_of(type(self))
        changed = {key: value for key, value in self.options().items() if value != declared[key].plain_default}
        if not changed:
            return self.name
        text = yaml.safe_dump(changed, default_flow_style=True, sort_keys=False, width=float("inf"))
        return f"{self.name}: {text.strip()}"


SEED = Range(ge=0, le=(1 << 63) - 1)
TOKENS = Range(ge=1, le=1 << 24)
DAMPING = Range(gt=0, le=1, usual=0.01)
