"""Sections of a recipe: pydantic models, most of them made from the options that a dataclass declares."""

from dataclasses import MISSING, is_dataclass
from functools import partial
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    create_model,
)
from pydantic_core import CoreSchema, core_schema

from ingot.errors import UsageError
from ingot.options import SIZE_PATTERN, Items, Option, Range, options_of, parse_bytes


class Section(BaseModel):
    """A mapping of keys: frozen, without unknown keys, values of exactly the stated types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class _DeclaredSection(Section):
    """A section whose value is the dataclass that declares its keys."""

    declaring: ClassVar[type]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        serialization = core_schema.plain_serializer_function_ser_schema(cls._keys_of)
        return core_schema.no_info_wrap_validator_function(cls._read, handler(source), serialization=serialization)

    @classmethod
    def _read(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        # pydantic wraps the class and then each field of it, so that `validate` may return the dataclass already.
        found = value if isinstance(value, cls.declaring) else validate(value)
        try:
            return cls.declaring(**dict(found)) if isinstance(found, cls) else found
        except UsageError as error:
            # What the dataclass says of its values together is a mistake at this key.
            raise ValueError(str(error)) from error

    @classmethod
    def _keys_of(cls, value: Any) -> dict[str, Any]:
        return {name: getattr(value, name) for name in cls.model_fields}


def section_of(declaring: Any) -> type[Section]:
    """Return the section that sets the options of a dataclass that have a Doc, and is read as an instance of it."""
    options = [option for option in options_of(declaring).values() if option.doc.text]
    keys: dict[str, Any] = {option.name: (key_type(option), _key(option)) for option in options}
    meaning = (declaring.__doc__ or "").partition("\n\n")[0]
    made = create_model(declaring.__name__, __base__=_DeclaredSection, __doc__=meaning, **keys)
    made.declaring = declaring
    return made


def _key(option: Option) -> Any:
    default: Any = ... if option.default is MISSING else option.default
    return Field(default=default, description=option.doc.text)


def key_type(option: Option) -> Any:
    """Return the type of a key that sets the option, with its bounds as pydantic checks them."""
    if option.reader is not None:
        schema = WithJsonSchema(dict(option.reader.schema), mode="validation")
        return Annotated[option.reader.reads, BeforeValidator(option.reader.read), schema]
    found = _checked(option.annotation)
    if option.items is None:
        return found
    limits = Field(min_length=option.items.least, max_length=option.items.most)
    return Annotated[found, limits, AfterValidator(partial(_agreeing, option.items))]


def _agreeing(items: Items, values: Any) -> Any:
    items.check(values)
    return values


def _checked(annotation: Any) -> Any:
    """Return an option's annotation in pydantic's terms."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _bounded(*args)
    if origin in (Union, UnionType):
        return Union[tuple(_checked(member) for member in args)]  # noqa: UP007 - its members are known only here
    if origin is tuple:
        return tuple[_checked(args[0]), ...]  # type: ignore[misc]
    return section_of(annotation) if is_dataclass(annotation) else annotation


def _bounded(scalar: Any, bounds: Range) -> Any:
    limits = Field(ge=bounds.ge, gt=bounds.gt, le=bounds.le)
    if scalar is not int:
        return Annotated[scalar, limits]
    number = Annotated[int, limits, BeforeValidator(as_bytes if bounds.bytes else as_whole)]
    if not bounds.bytes:
        return number
    return Annotated[number, WithJsonSchema(bytes_schema(bounds.ge, bounds.le), mode="validation")]


def bytes_schema(least: float | None, most: float | None) -> dict[str, Any]:
    """Return the JSON Schema of a size in bytes, as a number or with a unit."""
    sizes = {"type": "integer", "minimum": least, "maximum": most}
    return {"anyOf": [sizes, {"type": "string", "pattern": f"^{SIZE_PATTERN}$"}]}


def as_whole(value: object) -> object:
    """Return a float without a fraction, such as 1e4, as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_bytes(value: object) -> object:
    """Return a size, which may be a text such as 4GiB, as an integer."""
    return parse_bytes(value) if isinstance(value, str) else as_whole(value)
