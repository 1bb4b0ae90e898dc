"""What a pass is: a frozen dataclass whose fields are its options.

    @dataclass(frozen=True)
    class DropTwins(Pass):
        name: ClassVar[str] = "drop-twins"
        kind: ClassVar[PassKind] = "clean-up"
        summary: ClassVar[str] = "Removes the second of two equal nodes."
        max_bytes: int = 1024

        def call(self, model: ir.Model) -> ir.passes.PassResult: ...

`str(DropTwins(max_bytes=8))` is `drop-twins: {max_bytes: 8}`, which can be pasted into a recipe. Options that still
have their default are left out. To add a pass, see docs/passes.md.
"""

from dataclasses import MISSING, dataclass, fields
from typing import ClassVar, Literal

import onnx_ir as ir
import yaml

from ingot.errors import PassError
from ingot.passes.options import check_options, plain_value

PassKind = Literal["clean-up", "fusion", "quantization", "pruning", "lowering"]
LOSSY: tuple[PassKind, ...] = ("quantization", "pruning")  # a baseline leaves them out, an export runs them alone


@dataclass(frozen=True)
class Pass(ir.passes.InPlacePass):
    """One rewrite of the IR, in place.

    `requires` and `ensures` raise PassError when the model before or after is not what the pass promises.
    `call` returns a PassResult with a truthful `modified`. Wrong option types raise UsageError at birth; a pass that
    limits its options further extends `__post_init__`.
    """

    name: ClassVar[str]
    kind: ClassVar[PassKind]
    summary: ClassVar[str]
    needs_calibration: ClassVar[bool] = False  # asks for the service of calibration.py

    def __post_init__(self) -> None:
        check_options(self.name, self)

    def __call__(self, model_or_result: ir.Model | ir.passes.PassResult, /) -> ir.passes.PassResult:
        """Run requires, call and ensures; a broken condition is a PassError that starts with the pass's name."""
        try:
            return super().__call__(model_or_result)
        except (ir.passes.InvariantError, ir.passes.PassError) as error:
            raise PassError(f"{self.name}: {error.__cause__ or error}") from error

    @property
    def asks_calibration(self) -> bool:
        """Whether it asks for calibration with the options that it has."""
        return self.needs_calibration

    def requires(self, model: ir.Model) -> None:
        """Raise PassError when the model is not ready for this pass. By default every model is."""

    def ensures(self, model: ir.Model) -> None:
        """Raise PassError when the pass did not do what it promises. By default nothing is promised."""

    def options(self) -> dict[str, object]:
        """Every option with its value, as plain data (lists and dicts) that YAML and JSON can hold."""
        return {field.name: plain_value(getattr(self, field.name)) for field in fields(self)}

    def __str__(self) -> str:
        """The pass as one entry of a recipe's list: its name and the options that differ from their defaults."""
        changed = {key: value for key, value in self.options().items() if value != _default(self, key)}
        if not changed:
            return self.name
        text = yaml.safe_dump(changed, default_flow_style=True, sort_keys=False, width=float("inf"))
        return f"{self.name}: {text.strip()}"


def _default(pass_: Pass, option: str) -> object:
    """The option's default as plain data; MISSING when it has none, which equals no value."""
    field = next(field for field in fields(pass_) if field.name == option)
    if field.default_factory is not MISSING:
        return plain_value(field.default_factory())
    return plain_value(field.default)
