"""The loop at the terminal: conversations, commands, interruptions; and a real terminal around `ingot run`."""

import io
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ingot.artifact import Artifact
from ingot.cli.main import run
from ingot.cli.runtime.prompt_loop import PromptLoop
from ingot.errors import UsageError
from ingot.runtime import Engine, SamplingParams, Tokenizer
from tests.cli.refusals import assert_refused
from tests.conftest import BuildArtifact
from tests.data_paths import DEMO_MODEL
from tests.runtime.engines import demo_tokenizer, text_engine
from tests.simulators.fake_executor import FakeExecutor

Captured = pytest.CaptureFixture[str]
FOUR = SamplingParams(max_tokens=4)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture
def chat_engine(tmp_path: Path) -> Iterator[Engine]:
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.load(tmp_path)
    with Engine(FakeExecutor(vocab_size=tokenizer.vocab_size), tokenizer) as engine:
        yield engine


def typed(*lines: str | BaseException) -> Callable[[str], str]:
    """Reads the given lines, raises the given exceptions, then ends."""
    upcoming = iter(lines)

    def read_line(prompt: str) -> str:
        line = next(upcoming, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    return read_line


def asked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, str]]]:
    """The conversations that the engine is given from now on, as (role, content)."""
    seen: list[list[tuple[str, str]]] = []
    encode = engine.encode_chat

    def recorded(messages: list[dict[str, str]]) -> list[int]:
        seen.append([(one["role"], one["content"]) for one in messages])
        return encode(messages)

    monkeypatch.setattr(engine, "encode_chat", recorded)
    return seen


def test_a_conversation_is_remembered_until_it_is_cleared(
    chat_engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    seen = asked(chat_engine, monkeypatch)
    lines = typed("one", "two", "/clear", "three", "/system be brief", "four", "/exit", "never")
    PromptLoop(chat_engine, FOUR, read_line=lines).run(keeps_history=False)
    assert [[role for role, _ in turns] for turns in seen] == [
        ["user"],
        ["user", "assistant", "user"],
        ["user"],
        ["system", "user"],
    ]
    assert seen[1][0] == ("user", "one")
    assert seen[1][1][1] in capsys.readouterr().out
    assert seen[3] == [("system", "be brief"), ("user", "four")]


def test_a_message_of_several_lines_and_one_that_begins_with_a_slash(
    chat_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = asked(chat_engine, monkeypatch)
    lines = typed('"""first', "second", 'third"""', "//etc is a folder")
    PromptLoop(chat_engine, FOUR, read_line=lines).run(keeps_history=False)
    assert seen[0] == [("user", "first\nsecond\nthird")]
    assert seen[1][-1] == ("user", "/etc is a folder")


def test_without_a_template_each_line_is_continued(capsys: Captured) -> None:
    with text_engine() as engine:
        PromptLoop(engine, FOUR, read_line=typed("def f", "")).run(keeps_history=False)
        expected = engine.generate("def f", FOUR).text
    shown = capsys.readouterr()
    assert f"def f{expected}\n" in shown.out
    assert "no chat template" in shown.err


def test_ctrl_c_stops_an_answer_and_keeps_what_came(
    chat_engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    seen = asked(chat_engine, monkeypatch)
    stream = chat_engine.stream

    def interrupted(*args: object, **options: object) -> Iterator[object]:
        outputs = stream(*args, **options)  # type: ignore[arg-type]
        yield next(outputs)
        monkeypatch.setattr(chat_engine, "stream", stream)
        raise KeyboardInterrupt

    monkeypatch.setattr(chat_engine, "stream", interrupted)
    PromptLoop(chat_engine, FOUR, read_line=typed("one", KeyboardInterrupt(), "two")).run(keeps_history=False)
    shown = capsys.readouterr()
    assert "stopped" in shown.err
    assert "Ctrl-D or /exit leaves" in shown.err
    assert [role for role, _ in seen[1]] == ["user", "assistant", "user"]
    assert not chat_engine.has_unfinished()


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("/hlep", "unknown command '/hlep'. Did you mean '/help'?"),
        ("/set temperatur 1", "Did you mean 'temperature'?"),
        ("/set temperature hot", "temperature is 'hot'; it must be a number"),
        ("/set top_p 3", "top_p is 3.0; it must be above 0"),
        ("word " * 3000, "/clear forgets the conversation"),
    ],
)
def test_a_mistake_is_one_error_and_the_loop_goes_on(
    chat_engine: Engine, line: str, wanted: str, capsys: Captured
) -> None:
    PromptLoop(chat_engine, FOUR, read_line=typed("one", line, "/set max_tokens 2", "/set")).run(keeps_history=False)
    shown = capsys.readouterr()
    assert wanted in shown.err
    assert shown.err.count("error: ") == 1
    assert "max_tokens 2" in shown.out


def test_statistics_are_shown_where_they_are_requested(chat_engine: Engine, capsys: Captured) -> None:
    PromptLoop(chat_engine, FOUR, shows_stats=True, read_line=typed("one", "/stats")).run(keeps_history=False)
    shown = capsys.readouterr().err
    assert "4 tokens, length; first token after" in shown
    assert "engine: " in shown


def test_a_chat_requires_a_template() -> None:
    with text_engine() as engine:
        assert engine.tokenizer is demo_tokenizer()
        with pytest.raises(UsageError, match="no chat template"):
            PromptLoop(engine, FOUR, True)
        with pytest.raises(UsageError, match="--system requires a chat"):
            PromptLoop(engine, FOUR, None, "be brief")


def test_the_history_is_kept_for_the_user_alone(
    chat_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    PromptLoop(chat_engine, FOUR, read_line=typed()).run()
    assert (tmp_path / "cache" / "prompts_history").stat().st_mode & 0o777 == 0o600
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("INGOT_CACHE", str(blocked / "cache"))  # cannot be made
    PromptLoop(chat_engine, FOUR, read_line=typed()).run()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("arguments", "wanted"), [([], "not a terminal"), (["--json"], "--json requires a prompt")])
def test_the_loop_needs_a_terminal_for_its_answers(
    arguments: list[str], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(sys, "stdin", _Terminal())
    code = run(["run", str(tmp_path), *arguments])
    assert_refused(code, capsys.readouterr().err, wanted, expected_code=2)


def test_at_a_real_terminal_lines_are_answered_until_ctrl_d(build_unmeasured: BuildArtifact, tmp_path: Path) -> None:
    artifact: Artifact = build_unmeasured("int4-cpu")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ingot", "run", str(artifact.path), "--max-tokens", "3"]
    environment = {**os.environ, "INGOT_CACHE": str(tmp_path), "TERM": "dumb"}
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    answers = iter([b"def f\n", b"\x04"])
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
            if shown.endswith(b">>> "):
                os.write(ours, next(answers))
                shown += b"\n"
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(ours)
    assert child.wait(timeout=60) == 0
    assert shown.count(b">>> ") == 2
    assert b"/help lists the commands" in shown
    assert b"Traceback" not in shown
    assert b"cut after 3 tokens" in shown
