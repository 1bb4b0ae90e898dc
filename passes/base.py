"""Checks a pass's options against the annotations of its fields.

Known annotations: bool, int, float, str, Literal[...], tuple[X, ...], Mapping[str, X], X | None, object. An option from
a recipe or a command line is plain data: a list becomes a tuple, a whole number becomes a float where one is wanted.

What a pass is: a frozen dataclass whose fields are its options.

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

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Protocol, Union, get_args, get_origin, get_type_hints

import onnx_ir as ir
import yaml

from ingot.errors import PassError, UsageError, did_you_mean


class HasFields(Protocol):
    """Any dataclass instance."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


class _WrongTypeError(Exception):
    """The value is not what the annotation asks for."""


def check_options(owner: str, instance: HasFields) -> None:
    """Raise UsageError for the first field of the dataclass whose value does not fit its annotation."""
    hints = get_type_hints(type(instance))
    for field in fields(instance):
        convert_option(owner, field.name, getattr(instance, field.name), hints[field.name])


def convert_option(owner: str, option: str, value: object, annotation: Any) -> Any:
    """Return the value in the annotation's type; UsageError names owner, option, value and what is allowed."""
    try:
        return _convert(value, annotation)
    except _WrongTypeError:
        near = did_you_mean(value, get_args(annotation)) if _is_names(annotation) and isinstance(value, str) else ""
        raise UsageError(f"{owner}: {option} is {value!r}; allowed: {describe(annotation)}.{near}") from None


def describe(annotation: Any) -> str:
    """What an annotation allows, in words."""
    origin, args = get_origin(annotation), get_args(annotation)
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


def _is_names(annotation: Any) -> bool:
    return get_origin(annotation) is Literal and all(isinstance(arg, str) for arg in get_args(annotation))


def _convert(value: object, annotation: Any) -> Any:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return _convert_choice(value, args)
    if origin in (Union, UnionType):
        return _convert_union(value, args)
    if origin is tuple:
        return _convert_tuple(value, args[0])
    if origin is not None and issubclass(origin, Mapping):
        return _convert_mapping(value, args[1])
    return _convert_scalar(value, annotation)


def _convert_choice(value: object, choices: tuple[object, ...]) -> object:
    for choice in choices:
        if type(value) is type(choice) and value == choice:  # True is not 1 here
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


def _convert_scalar(value: object, wanted: Any) -> Any:
    if wanted is object:
        return value
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise _WrongTypeError
    return value


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
