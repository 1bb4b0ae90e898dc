"""Chat templates: a checkpoint's jinja2 program that turns messages into a prompt.

A template comes with the checkpoint and is not trusted: it runs in jinja2's immutable sandbox and gets plain data only.
The environment matches that of transformers (`utils/chat_template_utils.py`), so that templates render the same.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from ingot.errors import RequestError

Message = Mapping[str, object]


class ChatTemplate:
    """One compiled template. `name` is its file, for error messages.

    `special_tokens` (bos_token, eos_token, ...) are variables in the template.
    """

    def __init__(self, source: str, name: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compile the source. Raises RequestError when it is not a jinja2 template."""
        self.source = source
        self.name = name
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"{name}, line {error.lineno}: the chat template is not valid jinja2: {error.message}; "
                "correct it, or give the prompt as plain text"
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """The prompt for `messages` ({"role": ..., "content": ...}, oldest first).

        `tools` are JSON schemas, `documents` have "title" and "text"; other variables are passed to the template.
        Raises RequestError for a message that is not a mapping with a role, and with the template's own message when
        it refuses the conversation.
        """
        conversation = [_checked_message(index, message) for index, message in enumerate(messages)]
        given = {name: _plain(value, name) for name, value in variables.items()}
        try:
            return self._template.render(
                **{**self._special_tokens, **given},
                messages=conversation,
                tools=_plain(tools, "tools"),
                documents=_plain(documents, "documents"),
                add_generation_prompt=add_generation_prompt,
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"{self.name}: the chat template refuses this conversation: {error}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise RequestError(
                f"{self.name}: the chat template cannot render this conversation ({error}); check that every message "
                "has the keys that the template reads"
            ) from error


def _checked_message(index: int, message: object) -> dict[str, Any]:
    """The message as plain data; RequestError when it is not a mapping or has no role."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(
            f'message {index} is {message!r}; it must be a mapping such as {{"role": "user", "content": "Hello"}}'
        )
    plain: dict[str, Any] = _plain(message, f"message {index}")
    return plain


def _plain(value: object, where: str) -> Any:
    """A copy made of JSON types only, so that a template cannot reach an object's methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(item, where) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return [_plain(item, where) for item in value]
    raise RequestError(
        f"{where} contains a {type(value).__name__}; allowed are texts, numbers, lists, mappings and None"
    )


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """A scope of the statements up to the end tag; a scope, because transformers renders a macro here."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """jinja2's namespace without names that begin with an underscore, which give access to CPython's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`: namespace(self=...) is allowed
        _refuse_private(dict(*args[1:], **kwargs))
        jinja2.utils.Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private((name,))
        super().__setitem__(name, value)


def _refuse_private(names: Any) -> None:
    for name in names:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"the template sets {name!r} on a namespace; rename it")


class _Dict:
    """`dict` in a template: callable, without attributes that lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As dict.fromkeys."""
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """json.dumps; jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment
