"""Chat templates: a checkpoint's jinja2 program that turns messages into a prompt.

A template comes with the checkpoint and is not trusted: it runs in jinja2's immutable sandbox, gets plain data only,
and pays for every step from a budget (template_budget.py), so that it ends soon and builds no large text. Templates
render as in transformers (`utils/chat_template_utils.py`), whose environment this is.
"""

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from types import TracebackType

import jinja2

from ingot.errors import ArtifactError, RequestError, one_of, shown
from ingot.runtime.text.messages import Message, PlainCopy, plain_messages, with_joined_parts, with_text_after
from ingot.runtime.text.template_budget import BudgetError, RenderingBudget, limited
from ingot.runtime.text.template_compiler import RefusedTemplateError
from ingot.runtime.text.template_environment import BoundedEnvironment
from ingot.runtime.text.template_operations import GLOBALS

MAX_PROMPT_CHARACTERS = 1 << 25
_MAX_REASON = 300
_CODE_FILE = "<template>"  # jinja2's name for the compiled code of a template from a text
_FINAL = "<the end of the final message> "  # marks it; its space shows whether the template strips texts
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", *GLOBALS}) | {
    "continue_final_message",
    *("caller", "kwargs", "loop", "self", "super", "varargs"),
}


class ChatTemplate:
    """One compiled template. `name` is its file, for error messages.

    `special_tokens` (bos_token, eos_token, ...) are variables in the template.
    """

    def __init__(self, source: str, name: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compile the source. Raises ArtifactError, with the line, when it is not a template that may run."""
        self.source = source
        self.name = name
        self._special_tokens = dict(special_tokens or {})
        self._template = _compiled(source, name)

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **variables: object,
    ) -> str:
        """The prompt for `messages`, oldest first.

        It ends where the model's answer begins, unless `add_generation_prompt` is False. With `continue_final_message`
        it ends in the last message, which is the assistant's and which the model continues.
        `tools` are JSON schemas, `documents` have "title" and "text"; other variables, such as enable_thinking, are
        passed to the template. Raises RequestError for what is not a message, for a variable whose name is reserved,
        with the template's own message when it refuses the conversation, and with its line when it fails.
        """
        copy = PlainCopy()
        conversation = plain_messages(messages, copy)
        if continue_final_message:
            _check_final(conversation, add_generation_prompt)
            conversation[-1] = with_text_after(conversation[-1], _FINAL)
        given = {
            **self._special_tokens,
            **{name: copy.of(value, f"the variable {name!r}") for name, value in _checked_names(variables).items()},
            "tools": copy.of(_checked_list(tools, "tools"), "tools"),
            "documents": copy.of(_checked_list(documents, "documents"), "documents"),
            "add_generation_prompt": not continue_final_message and add_generation_prompt is not False,
        }
        if any(isinstance(message.get("content"), list) for message in conversation) and not self._reads_parts:
            conversation = [with_joined_parts(message) for message in conversation]
        text = self._render({**given, "messages": conversation}, RenderingBudget(copy.units, len(conversation)))
        return self._until_final(text) if continue_final_message else text

    def _until_final(self, text: str) -> str:
        """The prompt up to the end of the last message, without white space there if the template strips texts."""
        before, mark, after = text.rpartition(_FINAL.strip())
        if not mark:
            raise _cannot_continue(f"{self.name} does not write the last message to its end")
        return before if after.startswith(" ") else before.rstrip()

    def _render(self, variables: Mapping[str, object], budget: RenderingBudget) -> str:
        pieces: list[str] = []
        length = 0
        try:
            with limited(budget):
                for piece in self._template.root_render_func(self._template.new_context(dict(variables))):
                    pieces.append(piece)
                    length += len(piece)
                    if length > MAX_PROMPT_CHARACTERS:
                        raise BudgetError(f"the prompt has more than {MAX_PROMPT_CHARACTERS:,} characters")
        except Exception as error:  # of the template's code, whatever it is
            raise self._failure(error) from error
        return "".join(pieces)

    def _failure(self, error: Exception) -> RequestError:
        """One message for whatever a template raises."""
        place = f"{self.name}, line {self._line(error.__traceback__)}"
        reason = _shortened(str(error)) or type(error).__name__
        if isinstance(error, BudgetError):
            return RequestError(f"{place}: the chat template does more than it may: {reason}; correct the template")
        if type(error) is jinja2.TemplateError:
            return RequestError(f"{place}: the chat template refuses this conversation: {reason}")
        if isinstance(error, RecursionError | MemoryError):
            reason = "it is nested too deep" if isinstance(error, RecursionError) else "out of memory"
        return RequestError(
            f"{place}: the chat template cannot render this conversation ({reason}); check that every message has the "
            "keys that the template reads"
        )

    def _line(self, trace: TracebackType | None) -> int:
        """Line of the template where the error was raised."""
        line = 1
        while trace:
            if trace.tb_frame.f_code.co_filename == _CODE_FILE:
                line = self._template.get_corresponding_lineno(trace.tb_lineno)
            trace = trace.tb_next
        return line

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template writes the text of a part; otherwise parts are joined to a text first."""
        message = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
        nothing = {"tools": None, "documents": None, "add_generation_prompt": True}
        try:
            text = self._render({**self._special_tokens, **nothing, "messages": [message]}, RenderingBudget(0, 1))
        except RequestError:
            return False
        return "Hello" in text and "'text'" not in text and '"text"' not in text  # the part itself, as Python or JSON


def _compiled(source: str, name: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except RefusedTemplateError as error:
        raise _invalid(name, error.lineno, f"cannot be used: {error.message}") from error
    except jinja2.TemplateSyntaxError as error:
        raise _invalid(name, error.lineno, f"is not valid jinja2: {error.message}") from error
    except Exception as error:  # of Python's compiler, for what jinja2 makes of the template
        raise _invalid(name, 1, f"is not valid jinja2: {error or type(error).__name__}") from error


def _invalid(name: str, line: int, reason: str) -> ArtifactError:
    return ArtifactError(
        f"{name}, line {line}: the chat template {_shortened(reason)}; correct it, or give the prompt as plain text"
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}..."


def _check_final(messages: Sequence[Message], add_generation_prompt: bool | None) -> None:
    """RequestError unless the last message can be continued."""
    if add_generation_prompt:
        raise _cannot_continue("add_generation_prompt begins another message: leave it out")
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not last.get("content"):
        raise _cannot_continue("the last message must be the assistant's, with a text as its content")


def _cannot_continue(reason: str) -> RequestError:
    return RequestError(f"continue_final_message: {reason}", field="continue_final_message")


def _checked_names(variables: Mapping[str, object]) -> Mapping[str, object]:
    for name in variables:
        if name in RESERVED or not name.isidentifier():
            raise RequestError(
                f"{shown(name)} cannot be a variable of a chat template; use another name. Reserved are "
                f"{one_of(RESERVED)}",
                field="variables",
            )
    return variables


def _checked_list(value: object, name: str) -> object:
    """The tools or documents; RequestError unless they are a list of mappings, or None."""
    if value is None:
        return None
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise RequestError(f"{name} is a {type(value).__name__}; it must be a list of mappings")
    for index, item in enumerate(value):
        if not isinstance(item, Mapping):
            example = " with the tool's JSON schema" if name == "tools" else ' with "title" and "text"'
            raise RequestError(f"{name}[{index}] is a {type(item).__name__}; it must be a mapping{example}")
    return value


@cache
def _environment() -> BoundedEnvironment:
    return BoundedEnvironment()
