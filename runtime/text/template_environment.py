"""The jinja2 environment of chat templates: that of transformers, in a sandbox where every operation is paid for."""

from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes, pass_context
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Joiner

from ingot.runtime.text.template_budget import (
    ITEM_UNITS,
    NODE_UNITS,
    SCALARS,
    checked_key,
    items_of,
    nested,
    spend,
    text_units,
    tree_units,
)
from ingot.runtime.text.template_compiler import PRIVATE_FILTERS, RefusedTemplateError, bound
from ingot.runtime.text.template_filters import FILTERS, TESTS
from ingot.runtime.text.template_operations import (
    GLOBALS,
    METHODS,
    Dict,
    FormatMethod,
    as_text,
    binary,
    compared,
    concatenated,
    joined,
    sliced,
)

MAX_SOURCE_CHARACTERS = 200_000


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        """A scope of the statements up to the end tag; a scope, because transformers renders a macro here."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with payments. A template runs only within `template_budget.limited`."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, jinja2.ext.loopcontrols],
            optimized=False,  # nothing is computed while compiling
            finalize=_printed,
        )
        self.filters = {**FILTERS, **dict(zip(PRIVATE_FILTERS, _PAYING, strict=True))}
        self.tests = dict(TESTS)
        self.globals = dict(GLOBALS)
        self._functions = tuple(value for value in GLOBALS.values() if not isinstance(value, Dict))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise RefusedTemplateError(f"it has {len(source):,} characters; at most {MAX_SOURCE_CHARACTERS:,}", 1)
        parser = Parser(self, source, name, filename)
        try:
            return bound(parser.parse(), self)
        except RecursionError:
            raise RefusedTemplateError("it is nested too deep", parser.stream.current.lineno) from None

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`, paid for."""
        return binary(operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`obj[argument]`."""
        return super().getitem(obj, checked_key(argument))

    def wrap_str_format(self, value: Any) -> Any:
        """`text.format`, paid for; None for any other value."""
        if isinstance(value, BuiltinMethodType | MethodType) and value.__name__ in ("format", "format_map"):
            text = value.__self__
            if isinstance(text, str):
                return FormatMethod(self, str(text), value.__name__)
        return None

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Apply a filter by name, as `map` does; those that the compiler inserts have no name in a template."""
        return super().call_filter(_public(name), *args, **kwargs)

    def call_test(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Apply a test by name, as `select` does."""
        return super().call_test(_public(name), *args, **kwargs)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, a method of METHODS or a function of GLOBALS. SecurityError for anything else."""
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        spend(2 * NODE_UNITS + ITEM_UNITS * (len(args) + len(kwargs)))
        if isinstance(function, BuiltinMethodType | MethodType):
            return _call_method(function, args, kwargs)
        if isinstance(function, Macro | LoopContext):
            with nested():
                return context.call(function, *args, **kwargs)
        if isinstance(function, Undefined | Dict | FormatMethod | Joiner) or function in self._functions:
            return function(*args, **kwargs)
        raise jinja2.exceptions.SecurityError(f"a {type(function).__name__} cannot be called")


def _call_method(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    owner, name = method.__self__, method.__name__
    if isinstance(owner, Dict):
        return method(*args, **kwargs)
    if isinstance(owner, str) and name == "join":
        return joined(owner, *args, **kwargs)
    cost = METHODS.get(type(owner), {}).get(name)
    if cost is None:
        raise jinja2.exceptions.SecurityError(f"the method {name!r} of a {type(owner).__name__} is not available")
    spend(cost(owner, *args, **kwargs))
    return method(*args, **kwargs)


def _public(name: Any) -> Any:
    if not isinstance(name, str | Undefined) or name in PRIVATE_FILTERS:
        raise jinja2.TemplateRuntimeError(f"a {type(name).__name__} is not the name of a filter or test")
    return name


@pass_context  # which keeps jinja2 from calling it while compiling
def _printed(context: Context, value: object) -> str:
    text = str(as_text(value))
    spend(2 * text_units(text))
    return text


def _pay(value: Any, units: int) -> Any:
    spend(units)
    return value


def _weighed(value: Any) -> Any:
    spend(tree_units(value))
    return value


def _compared(left: Any, symbol: str, right: Any) -> Any:
    return compared(symbol, left, right)


def _unpacked(value: Any) -> Any:
    """Arguments after `*` or `**`, paid for."""
    if isinstance(value, SCALARS):
        return value
    if hasattr(value, "keys"):
        spend(ITEM_UNITS * len(value))
        return value
    return items_of(value)


_PAYING = (_pay, concatenated, _compared, _weighed, sliced, _unpacked, checked_key)
