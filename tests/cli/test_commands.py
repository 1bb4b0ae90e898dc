"""Commands are declared without imports: help is quick everywhere, and each declaration fits its function."""

import inspect
import subprocess
import sys

import click

from ingot.cli.command import PARAMETER_GROUPS
from ingot.cli.compiler_commands import CHECKPOINT_FORMATS, FLOAT_TYPES, FORMATS
from ingot.cli.main import COMMANDS
from ingot.options import options_of
from ingot.pipeline.interchange import folder, formats
from ingot.runtime.server.options import ServerOptions
from tests.each_case import each_case

HEAVY = {"numpy", "onnx", "onnx_ir", "onnxruntime", "pydantic", "rich", "yaml", "tokenizers", "jinja2"}


@each_case("name", COMMANDS)
def test_the_function_of_a_command_takes_its_parameters(name: str) -> None:
    command = COMMANDS[name]
    declared = {parameter.name for parameter in command.params} - {"quiet", "progress"}
    for group, names in {**PARAMETER_GROUPS, "reports": ("junit", "summary")}.items():
        if declared >= {*names}:
            declared = declared - {*names} | {group}
    signature = inspect.signature(command.load())
    given = {one.name for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD}
    takes_more = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    assert given <= declared
    assert takes_more or given == declared


def test_names_in_help_are_those_of_the_tables() -> None:
    assert tuple(formats.FORMATS) == FORMATS
    assert formats.CHECKPOINT_FORMATS == CHECKPOINT_FORMATS
    assert tuple(folder.FLOAT_TYPES) == FLOAT_TYPES


def test_the_limits_of_a_server_are_flags_with_its_defaults() -> None:
    flags = {flag.name: flag for flag in COMMANDS["serve"].params if isinstance(flag, click.Option)}
    for name, option in options_of(ServerOptions).items():
        assert flags[name].get_default(click.Context(COMMANDS["serve"])) == option.default
        assert (flags[name].help or "").lower().startswith(option.doc.text.lower())
    defaults = flags["max_requests"], flags["idle_unload_seconds"], flags["allowed_hosts"]
    assert [flag.opts[0] for flag in defaults] == ["--max-requests", "--idle-unload", "--allowed-host"]


@each_case("arguments", [[], ["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from ingot.cli.main import run; run(sys.argv[1:]);"
        f"print('loaded', sorted({HEAVY!r} & set(sys.modules)))"
    )
    shown = subprocess.check_output([sys.executable, "-c", code, *arguments], text=True)
    assert shown.splitlines()[-1] == "loaded []"
