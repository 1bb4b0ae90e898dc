"""`ingot run ARTIFACT` at a terminal: a chat where the model has a template, else a loop of prompts to continue.

Line editing and history come from readline. Ctrl-C stops an answer, not the program; Ctrl-D leaves.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from ingot.cli.runtime.generation_stats import pace, print_stats
from ingot.cli.terminal.console import print_error, print_note
from ingot.errors import IngotError, UsageError, did_you_mean, one_of, shown
from ingot.runtime import Completion, Engine, RequestOptions, SamplingParams
from ingot.settings import cache_dir

_HISTORY_LINES = 1000
_FENCE = '"""'  # begins and ends a message of several lines
_HELP = {
    "/help": "this list",
    "/clear": "forget the conversation",
    "/system TEXT": "set the system message and forget the conversation; without TEXT, remove it",
    "/set NAME VALUE": "set a sampling parameter, such as temperature 0.7; without arguments, show them",
    "/stats": "show what the engine computed",
    "/exit": "leave, as Ctrl-D does",
    _FENCE: "begins and ends a message of several lines",
}
_NOT_SETTABLE = (
    "ignore_eos",
    "skip_special_tokens",
    "allowed_token_ids",
    "logprobs",
    "prompt_logprobs",
    "n",
    "best_of",
)
_SETTABLE = {  # parameter -> how its text is read
    field.name: int if field.name in ("max_tokens", "min_tokens", "top_k", "seed") else float
    for field in fields(SamplingParams)
    if isinstance(field.default, int | float | None) and field.name not in _NOT_SETTABLE
}

ReadLine = Callable[[str], str]
"""Shows a prompt and returns the line typed, as `input` does; EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C."""


class PromptLoop:
    """Reads lines, answers each, and keeps the conversation.

    is_chat   None: chat if the model has a chat template
    system    the first message of each conversation; it requires a chat
    """

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        is_chat: bool | None = None,
        system: str | None = None,
        *,
        shows_stats: bool = False,
        read_line: ReadLine = input,
        options: RequestOptions | None = None,
    ) -> None:
        has_template = engine.tokenizer is not None and engine.tokenizer.chat_template is not None
        self._is_chat = has_template if is_chat is None else is_chat
        if self._is_chat and not has_template:
            raise UsageError("the model has no chat template; leave out --chat to have prompts continued")
        if system is not None and not self._is_chat:
            raise UsageError("--system requires a chat, and the model has no chat template or --no-chat is given")
        self._engine = engine
        self._params = params
        self._system = system
        self._shows_stats = shows_stats
        self._read_line = read_line
        self._options = options
        self._turns: list[dict[str, str]] = []

    def run(self, keeps_history: bool = True) -> None:
        """Answer until the end of input or /exit."""
        kind = "chat" if self._is_chat else "the model continues each prompt: it has no chat template"
        print_note(f"{kind}; /help lists the commands, Ctrl-D leaves")
        with _line_history(keeps_history):
            while (text := self._next_message()) is not None:
                if text.startswith("/") and not text.startswith("//"):
                    if not self._command(text):
                        return
                elif text:
                    self._answer(text.removeprefix("/") if text.startswith("//") else text)

    def _next_message(self) -> str | None:
        """The next message, of several lines between fences; None at the end of input."""
        try:
            line = self._read_line(">>> ")
            if not line.lstrip().startswith(_FENCE):
                return line.strip() if self._is_chat else line
            lines = [line.lstrip().removeprefix(_FENCE)]
            while not lines[-1].rstrip().endswith(_FENCE):
                lines.append(self._read_line("... "))
            lines[-1] = lines[-1].rstrip().removesuffix(_FENCE)
            return "\n".join(lines).strip("\n")
        except EOFError:
            click.echo()
            return None
        except KeyboardInterrupt:
            click.echo()
            print_note("Ctrl-D or /exit leaves")
            return ""

    def _answer(self, text: str) -> None:
        """Stream the answer; an interrupted one stays in the conversation as far as it came."""
        turns = [*self._turns, {"role": "user", "content": text}]
        answer, done = "", None
        try:
            prompt = self._engine.encode_chat([*self._opening, *turns]) if self._is_chat else text
            with closing(self._engine.stream(prompt, self._params, options=self._options)) as outputs:
                click.echo("" if self._is_chat else click.style(text, bold=True), nl=False)
                for output in outputs:
                    answer += output.text
                    done = output.completion
                    click.echo(output.text, nl=False)
                    sys.stdout.flush()
            click.echo()
        except KeyboardInterrupt:
            click.echo()
            print_note("stopped")
        except IngotError as error:
            if answer:
                click.echo()
            hint = "; /clear forgets the conversation" if self._turns else ""
            print_error(f"{error}{hint}")
            return
        self._remember(turns, answer)
        if done is not None:
            self._note(done)

    @property
    def _opening(self) -> list[dict[str, str]]:
        return [] if self._system is None else [{"role": "system", "content": self._system}]

    def _remember(self, turns: list[dict[str, str]], answer: str) -> None:
        if self._is_chat:
            self._turns = [*turns, {"role": "assistant", "content": answer}]

    def _note(self, done: Completion) -> None:
        if self._shows_stats:
            print_note(
                f"{pace(done)}; prompt of {done.prompt_tokens} tokens, {done.cached_tokens} from the prefix cache"
            )
        elif done.finish_reason == "length":
            print_note(f"cut after {len(done.token_ids)} tokens; /set max_tokens N allows more")

    def _command(self, text: str) -> bool:
        """Carry out a command; False leaves the loop."""
        name, _, argument = text.partition(" ")
        match name:
            case "/exit" | "/quit" | "/bye":
                return False
            case "/help":
                for command, meaning in _HELP.items():
                    click.echo(f"  {command:<18}{meaning}")
            case "/clear":
                self._turns = []
            case "/system":
                self._set_system(argument.strip())
            case "/set":
                self._set_parameter(*argument.split(maxsplit=1))
            case "/stats":
                print_stats(self._engine)
            case _:
                names = [command.split()[0] for command in _HELP]
                near = did_you_mean(name, names)
                print_error(f"unknown command {shown(name)}.{near} /help lists them; begin with // to send a /")
        return True

    def _set_system(self, text: str) -> None:
        if not self._is_chat:
            print_error("a system message requires a chat template, which this model does not have")
            return
        self._system, self._turns = text or None, []

    def _set_parameter(self, name: str | None = None, value: str | None = None) -> None:
        """Set a sampling parameter; without a name, show all."""
        if name is None or value is None:
            for known in [name] if name in _SETTABLE else _SETTABLE:
                click.echo(f"  {known} {getattr(self._params, known)}")
            return
        try:
            self._params = replace(self._params, **_parameter(name, value))
        except IngotError as error:
            print_error(str(error))


def _parameter(name: str, value: str) -> dict[str, Any]:
    """A parameter from its text. UsageError for an unknown name or a text that is not a number."""
    if name not in _SETTABLE:
        raise UsageError(
            f"unknown parameter {shown(name)}; parameters: {one_of(_SETTABLE)}.{did_you_mean(name, _SETTABLE)}"
        )
    try:
        return {name: _SETTABLE[name](value)}
    except ValueError:
        raise UsageError(f"{name} is {shown(value)}; it must be a number") from None


@contextmanager
def _line_history(keeps_history: bool) -> Iterator[None]:
    """Line editing with the history of earlier runs, if Python has readline; only the user can read the file."""
    try:
        import readline
    except ImportError:
        yield
        return
    file = _history_file() if keeps_history else None
    readline.set_history_length(_HISTORY_LINES)
    if file is not None:
        with suppress(OSError):
            readline.read_history_file(file)
    try:
        yield
    finally:
        if file is not None:
            with suppress(OSError):  # a history that cannot be kept is not worth an error
                _write_private(file, readline.write_history_file)


def _history_file() -> Path | None:
    try:
        return cache_dir() / "prompts_history"
    except UsageError:  # a user without a home folder
        return None


def _write_private(file: Path, write: Callable[[Path], None]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(mode=0o600)
    write(file)
