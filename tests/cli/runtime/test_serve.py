"""`ingot serve`: what is refused, and what is missing without the extra.

tests/runtime/server/test_lifecycle.py has processes that serve.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.artifact import open_artifact
from ingot.cli.main import run
from ingot.cli.runtime.serve import _are_of_one_model
from ingot.errors import EngineError, UsageError
from ingot.runtime.server.models.served_models import Models, ServedModel
from ingot.version import install_command
from tests.conftest import BuildArtifact
from tests.each_case import each_case

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def artifact(build_unmeasured: BuildArtifact, two_layers: Path) -> str:
    return str(build_unmeasured("int8-cpu", two_layers).path)


@each_case(
    ("options", "message"),
    [
        (["--alias", "gpt"], "--alias 'gpt' is not ALIAS=MODEL, such as gpt-4o-mini=chat"),
        (["--alias", "a=b", "--alias", "a=c"], "--alias 'a' is given twice"),
        (["--max-requests", "0"], "--max-requests is 0; it must be a whole number from 1 to"),
        (["--stream-seconds", "-1"], "--stream-seconds is -1.0; it must be a finite number, 0 or above"),
        (["--idle-unload", "nan"], "--idle-unload is nan; it must be a finite number above 0"),
        (["--set", "max_sequence=4"], "unknown option 'max_sequence'. Did you mean 'max_sequences'?"),
        (["--api-keys", "nowhere.txt"], "nowhere.txt cannot be read as API keys: No such file or directory; name a"),
        (["--alias", "gpt=other"], "alias gpt: unknown model 'other'; models: int8-cpu"),
        (["--alias", "int8-cpu=int8-cpu"], "alias int8-cpu: a model has this name; choose another alias"),
        (["--lora-modules", "sql@other=x"], "--lora-modules: unknown model 'other'; models: int8-cpu"),
        (["--lora-modules", "int8-cpu=x"], "the adapter 'int8-cpu' has the name of a model"),
        (["--allow-lora-updates", "nowhere"], "--allow-lora-updates nowhere is not a folder; create it first"),
        (["--allow-lora-updates", "."], "--allow-lora-updates takes the keys of --admin-keys FILE"),
        (["--host", "nowhere.invalid"], "cannot listen on nowhere.invalid, port 8000"),
        (["--port", "70000"], "70000 is not in the range 0<=x<=65535"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_loads(
    artifact: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.delattr("ingot.runtime.AsyncEngine.load_in_process")
    assert run(["serve", artifact, *options]) in (1, UsageError.exit_code)
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_two_models_of_a_name_are_refused_before_they_load(
    artifact: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("ingot.runtime.AsyncEngine.load_in_process")
    name = open_artifact(artifact, verify=False).manifest.name
    assert run(["serve", artifact, artifact, "--port", "0", "-q"]) == UsageError.exit_code
    folder = Path(artifact).name
    assert capsys.readouterr().err == (
        f"error: two models are named '{name}'; give each a name of its own: ingot serve {folder}={artifact}"
        f" {folder}-2={artifact}\n"
    )


def test_two_artifacts_of_one_name_are_served_under_names_of_their_own(
    artifact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[list[str]] = []

    async def serve(_service: object, listening: socket.socket, load: Callable[[], Models], **_: object) -> None:
        listening.close()
        models = load()
        served.append(models.names)
        for model in models.by_name.values():
            await model.engine.close()

    monkeypatch.setattr("ingot.runtime.server.lifecycle.run", serve)
    try:
        assert run(["serve", f"small={artifact}", f"exact={artifact}", "--port", "0", "-q", "--no-engine-process"]) == 0
    finally:
        gc.unfreeze()
    assert served == [["small", "exact"]]


def test_the_name_of_an_artifact_is_checked(artifact: str, capsys: Captured) -> None:
    for given in (f"a b={artifact}", f"={artifact}", "name="):
        assert run(["serve", given, "--port", "0", "-q"]) == UsageError.exit_code
        assert "is not NAME=FOLDER: a name has letters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "chat_template nowhere.jinja is not a file; name a jinja2 template"), ("{% if %}", "template.jinja")],
)
def test_a_chat_template_that_cannot_be_used_is_refused(
    artifact: str, capsys: Captured, tmp_path: Path, text: str | None, message: str
) -> None:
    file = tmp_path / "template.jinja"
    if text is not None:
        file.write_text(text)
    given = "nowhere.jinja" if text is None else str(file)
    assert run(["serve", artifact, "--port", "0", "-q", "--chat-template", given]) in (1, UsageError.exit_code)
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_key_of_users_and_of_administrators_is_refused(artifact: str, tmp_path: Path, capsys: Captured) -> None:
    users, administrators = tmp_path / "users", tmp_path / "administrators"
    users.write_text("first-key-1\nshared-key-2 priority=1\n")
    administrators.write_text("# operators\nshared-key-2\n")
    command = ["serve", artifact, "--api-keys", str(users), "--admin-keys", str(administrators)]
    assert run(command) == UsageError.exit_code
    assert f"{administrators}:2: the admin key is the API key of {users}:2" in capsys.readouterr().err


def test_a_log_of_json_has_the_error_that_ends_the_command_too(
    artifact: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise EngineError("the device is gone")

    monkeypatch.setattr("ingot.runtime.AsyncEngine.load_in_process", fail)
    command = ["serve", artifact, "--port", "0", "--log-format", "json", "--no-verify"]
    assert run(command) == EngineError.exit_code
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["level"] for line in lines] == ["INFO", "WARNING", "CRITICAL"]
    assert lines[0]["message"].startswith("loading, on http://127.0.0.1:")
    assert lines[-1]["message"] == "the device is gone"


def test_the_collector_passes_over_what_is_loaded(artifact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []

    async def serve(_service: object, listening: socket.socket, load: Callable[[], Models], **_: object) -> None:
        listening.close()
        models = load()
        frozen.append(gc.get_freeze_count())
        for model in models.by_name.values():
            await model.engine.close()

    monkeypatch.setattr("ingot.runtime.server.lifecycle.run", serve)
    try:
        assert run(["serve", artifact, "--port", "0", "-q"]) == 0
    finally:
        gc.unfreeze()
    assert frozen[0] > 10_000


def test_verify_new_runs_verify_on_a_new_artifact_and_refuses_one_that_does_not_pass(
    artifact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    codes = iter([0, 3])

    def verify(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        commands.append(command)
        return subprocess.CompletedProcess(command, next(codes), "", "note\nlevel 2 does not hold: step 5 differs\n")

    async def serve(
        service: Any,
        listening: socket.socket,
        load: Callable[[], Models],
        *,
        reload: Callable[[str, bool], ServedModel],
        **_: object,
    ) -> None:
        listening.close()
        service.models = load()
        models = [
            *service.models.by_name.values(),
            reload("int8-cpu", False),
        ]  # after a failure: the artifact is not new
        assert not commands
        models.append(reload("int8-cpu", True))
        with pytest.raises(UsageError, match="does not pass ingot verify --quick: level 2 does not hold: step 5"):
            reload("int8-cpu", True)
        for model in models:
            await model.engine.close()

    monkeypatch.setattr("ingot.runtime.server.lifecycle.run", serve)
    monkeypatch.setattr("ingot.cli.runtime.serve.subprocess.run", verify)
    try:
        assert run(["serve", artifact, "--port", "0", "-q", "--verify-new", "--no-verify", "--no-engine-process"]) == 0
    finally:
        gc.unfreeze()
    assert commands == 2 * [[sys.executable, "-m", "ingot", "verify", artifact, "--quick"]]


@each_case(
    ("path", "message"),
    [("int8-cpu", "int8-cpu is a recipe, not an artifact"), ("nowhere", "no such artifact"), ("a/b", "Hugging Face")],
)
def test_what_cannot_be_built_either_is_refused(path: str, message: str, capsys: Captured) -> None:
    assert run(["serve", path]) == UsageError.exit_code
    assert message in capsys.readouterr().err


BLOCKED = """
import sys
for name in ("starlette", "uvicorn", "prometheus_client"):
    sys.modules[name] = None  # an import fails as it does where the package is missing
"""


def test_the_runtime_does_without_the_extra_and_the_command_names_it(artifact: str) -> None:
    code = f"{BLOCKED}import ingot.runtime, ingot.runtime.server\nfrom ingot.cli.main import run\n"
    code += f"sys.exit(run(['serve', {artifact!r}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: this command needs ")
    assert line.endswith(f", part of the server; {install_command('serve')}")


def test_a_hangup_while_it_loads_has_no_effect_and_one_that_is_ignored_stays_so(
    artifact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def loading(*given: object, **options: object) -> int:
        seen.append(signal.getsignal(signal.SIGHUP))
        if seen[-1] is not signal.SIG_IGN:
            os.kill(os.getpid(), signal.SIGHUP)
        return 0

    monkeypatch.setattr("ingot.cli.runtime.serve._serve", loading)
    before = signal.getsignal(signal.SIGHUP)
    try:
        for usual in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signal.SIGHUP, usual)
            assert run(["serve", artifact]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert seen[0] is not signal.SIG_DFL
    assert seen[1] is signal.SIG_IGN


def test_a_model_in_fewer_or_more_bits_is_the_same_model(artifact: str) -> None:
    manifest = open_artifact(artifact, verify=False).manifest
    exact = manifest.model_copy(update={"name": "int4", "identity": "0" * 64})
    assert _are_of_one_model(manifest, exact)
    other = exact.model_copy(update={"model": exact.model.model_copy(update={"vocab_size": 7})})
    assert not _are_of_one_model(manifest, other)
