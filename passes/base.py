"""The base class of all passes: one rewrite of the IR, with typed options and facts that the rest of Ingot reads.

    @dataclass(frozen=True)
    class DropTwins(Pass):
        name: ClassVar[str] = "drop-twins"
        kind: ClassVar[PassKind] = "clean-up"
        summary: ClassVar[str] = "Removes the second of two equal nodes."

        max_bytes: int = 1024

        def call(self, model: ir.Model) -> ir.passes.PassResult: ...

A pass is a frozen dataclass whose fields are its options. `str(DropTwins(max_bytes=8))` is
`drop-twins: {max_bytes: 8}`, which can be pasted into a recipe; options at their default are left out. docs/passes.md
describes how to add a pass.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import onnx_ir as ir
import yaml

from ingot.artifact.kv_geometry import KVType
from ingot.errors import PassError, UsageError, did_you_mean, shown

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
        for option, annotation in option_types(type(self)).items():
            converted = convert_option(self.name, option, getattr(self, option), annotation)
            object.__setattr__(self, option, converted)  # frozen only from here on

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
        return {field.name: plain_value(getattr(self, field.name)) for field in fields(self)}

    def __str__(self) -> str:
        """The pass as one entry of a recipe's list: its name and the options that differ from their defaults."""
        changed = {key: value for key, value in self.options().items() if value != _default(self, key)}
        if not changed:
            return self.name
        text = yaml.safe_dump(changed, default_flow_style=True, sort_keys=False, width=float("inf"))
        return f"{self.name}: {text.strip()}"


@dataclass(frozen=True, kw_only=True)
class Range:
    """Bounds of a number, as in `steps: Annotated[int, Range(ge=1, le=1000)] = 10`; `usual` is a hint for messages.

    There is a lower bound, `ge` or `gt`, and an upper one, `le` or `lt`.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    usual: float | None = None

    def __post_init__(self) -> None:
        assert (self.ge is None) != (self.gt is None)
        assert (self.le is None) != (self.lt is None)

    def __contains__(self, value: float) -> bool:
        """Whether the number is within the bounds; False for NaN."""
        is_above = value > self.gt if self.gt is not None else self.ge is not None and value >= self.ge
        return is_above and (value < self.lt if self.lt is not None else self.le is not None and value <= self.le)

    def __str__(self) -> str:
        least = f"from {_number(self.ge)}" if self.ge is not None else f"above {_number(self.gt)},"
        most = f"below {_number(self.lt)}" if self.lt is not None else _number(self.le)
        hint = "" if self.usual is None else f" ({_number(self.usual)} is usual)"
        return f"{least} {'to' if self.ge is not None else 'up to'} {most}{hint}"


def _number(value: float | None) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


SEED = Range(ge=0, le=(1 << 63) - 1)
TOKENS = Range(ge=1, le=1 << 24)
DAMPING = Range(gt=0, le=1, usual=0.01)


def option_types(pass_class: type[Pass]) -> dict[str, Any]:
    """The annotation of each option, with its Range if it has one."""
    hints = get_type_hints(pass_class, include_extras=True)
    return {field.name: hints[field.name] for field in fields(pass_class)}


def option_docs(pass_class: type[Pass]) -> dict[str, str]:
    """The meaning of each option, from the list in the docstring of the class or of one that it extends."""
    found: dict[str, str] = {}
    for base in reversed(pass_class.__mro__):
        names: list[str] = []
        for line in (inspect.cleandoc(base.__doc__ or "") if issubclass(base, Pass) else "").splitlines():
            if entry := re.fullmatch(r"(\w+(?:, \w+)*) {2,}(\S.*)", line):
                names = entry[1].split(", ")
                found.update(dict.fromkeys(names, entry[2]))
            elif names and line.startswith("    "):
                found.update({name: f"{found[name]} {line.strip()}" for name in names})
            else:
                names = []
    return {option: found[option] for option in option_types(pass_class) if option in found}


def convert_option(owner: str, option: str, value: object, annotation: Any) -> Any:
    """Return the value in the annotation's type; UsageError names owner, option, value and what is allowed.

    Annotations: bool, int, float, str, Literal[...], tuple[X, ...], Mapping[str, X], X | None, object, and numbers with
    their bounds, Annotated[int, Range(...)]. The value may be plain data from YAML or a command line: a list becomes a
    tuple, an int becomes a float where the annotation is one, and 1e4 becomes an int.
    Written by hand because pydantic, strict or not, takes True for Literal[1] and 4.0 for Literal[4], and in strict
    mode refuses a list for a tuple.
    """
    value = _with_whole_number(value, annotation)
    try:
        return _convert(value, annotation)
    except _WrongTypeError:
        near = did_you_mean(value, get_args(annotation)) if _is_names(annotation) and isinstance(value, str) else ""
        raise UsageError(f"{owner}: {option} is {shown(value)}; allowed: {describe(annotation)}.{near}") from None


def describe(annotation: Any) -> str:
    """The values that an annotation allows, in words."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return f"{describe(args[0])} {args[1]}"
    if origin is Literal:
        return " or ".join(repr(arg) if isinstance(arg, str) else str(arg) for arg in args)
    if origin in (Union, UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is tuple:
        return f"a list, each {describe(args[0])}"
    if origin is not None and issubclass(origin, Mapping):
        return f"a mapping from names to {describe(args[1])}"
    return _WORDS.get(annotation, str(annotation))


def plain_value(value: object) -> object:
    """The value with tuples as lists and mappings as dicts, all the way down."""
    if isinstance(value, Mapping):
        return {key: plain_value(item) for key, item in value.items()}
    return [plain_value(item) for item in value] if isinstance(value, tuple | list) else value


_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    NoneType: "null",
    object: "any value",
}


class _WrongTypeError(Exception):
    """The value does not have the annotation's type."""


def _default(pass_: Pass, option: str) -> object:
    """The option's default as plain data; MISSING, which equals no value, when it has none."""
    field = next(field for field in fields(pass_) if field.name == option)
    if field.default_factory is not MISSING:
        return plain_value(field.default_factory())
    return plain_value(field.default)


def _is_names(annotation: Any) -> bool:
    return get_origin(annotation) is Literal and all(isinstance(arg, str) for arg in get_args(annotation))


def _with_whole_number(value: object, annotation: Any) -> object:
    """A float without a fraction, such as 1e4, as an int, where only that fits the annotation."""
    if not isinstance(value, float) or not value.is_integer() or int not in _scalars(annotation):
        return value
    try:
        _convert(value, annotation)
    except _WrongTypeError:
        return int(value)
    return value


def _scalars(annotation: Any) -> list[Any]:
    """The types of the single values that an annotation allows."""
    if get_origin(annotation) is Annotated:
        return [get_args(annotation)[0]]
    if get_origin(annotation) in (Union, UnionType):
        return [scalar for member in get_args(annotation) for scalar in _scalars(member)]
    return [annotation]


def _convert(value: object, annotation: Any) -> Any:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _convert_bounded(value, *args)
    if origin is Literal:
        return _convert_choice(value, args)
    if origin in (Union, UnionType):
        return _convert_union(value, args)
    if origin is tuple:
        return _convert_tuple(value, args[0])
    if origin is not None and issubclass(origin, Mapping):
        return _convert_mapping(value, args[1])
    return _convert_scalar(value, annotation)


def _convert_bounded(value: object, scalar: type, bounds: Range) -> Any:
    number = _convert_scalar(value, scalar)
    if number not in bounds:
        raise _WrongTypeError
    return number


def _convert_choice(value: object, choices: tuple[object, ...]) -> object:
    for choice in choices:
        if type(value) is type(choice) and value == choice:  # True == 1
            return choice
    raise _WrongTypeError


def _convert_union(value: object, members: tuple[Any, ...]) -> Any:
    for member in members:
        try:
            return _convert(value, member)
        except _WrongTypeError:
            continue
    raise _WrongTypeError


def _convert_tuple(value: object, item: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _WrongTypeError
    return tuple(_convert(element, item) for element in value)


def _convert_mapping(value: object, item: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _WrongTypeError
    return {key: _convert(element, item) for key, element in value.items()}


def _convert_scalar(value: object, expected: Any) -> Any:
    if expected is object:
        return value
    if expected is float and type(value) is int and abs(value) < 1 << 1023:  # Python's largest float
        return float(value)
    if type(value) is not expected:
        raise _WrongTypeError
    return value
