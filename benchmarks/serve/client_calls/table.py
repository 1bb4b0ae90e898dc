"""What client libraries can do with a live server: each runs its calls in an environment that has it.

    python -m benchmarks.serve.client_calls.table [ARTIFACT] [--environments FOLDER] [--npm FOLDER]

FOLDER of `--environments` has virtual environments, one or more: a client runs in the one of its own name or of its
package, or in the first that has its package (libraries pin each other, so one environment cannot have all). `--npm` is
a folder with `npm install ai @ai-sdk/openai-compatible openai @anthropic-ai/sdk zod`. A client that is missing is a row
that says so. Only the loopback interface is used. Writes the results, and the table into docs/serve.md.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from benchmarks.cpu.serve import server_process
from benchmarks.device import device_facts
from benchmarks.paths import ROOT

MODEL = "demo"
PAGE = ROOT / "docs/serve.md"
RESULTS = ROOT / "benchmarks/results/serve-clients.json"
HEADER = "| client | version | what it does |\n|---|---|---|\n"
NPM_PACKAGES = ("ai", "openai", "@anthropic-ai/sdk")
_KEY, _LIMITED_KEY = "sk-clients", "sk-limited"
_FOLDER = Path(__file__).parent
_SECONDS = 600.0
# The demo's own template has no format of calls, and clients that let the model choose need one.
_TEMPLATE = "{# <tool_call> #}{% for message in messages %}{{ message.content }}\n{% endfor %}"
_QUIET = {
    "OPENAI_API_KEY": "none",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Chats:
    """A server of an artifact: its URL, and the folder of its model's tokenizer."""

    url: str
    tokenizer: Path

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of the clients' scripts."""
        return [self.url, MODEL, _KEY, _LIMITED_KEY]


@contextmanager
def chat_server(artifact: str) -> Iterator[Chats]:
    """A server of an artifact that chats, as the model `demo`, with a key and a second one for one request a minute."""
    with TemporaryDirectory() as folder:
        template, keys = Path(folder, "template.jinja"), Path(folder, "keys")
        template.write_text(_TEMPLATE, encoding="utf-8")
        keys.write_text(f"{_KEY}\n{_LIMITED_KEY} requests_per_minute=1\n", encoding="utf-8")
        options = ("--chat-template", str(template), "--api-keys", str(keys))
        with server_process(f"{MODEL}={artifact}", *options) as (url, _):
            yield Chats(url, Path(artifact, "tokenizer").resolve())


def clients() -> dict[str, str]:
    """The Python clients, and the package that each needs ("" for a tool of the system)."""
    done = _run([sys.executable, str(_FOLDER / "call_clients.py")], {})
    found: dict[str, str] = json.loads(done.stdout)
    return found


def environment_of(client: str, package: str, folder: Path | None) -> Path:
    """The python of a client's environment: this one, if the folder has none."""
    found = sorted(folder.glob("*/bin/python")) if folder else []
    named = [python for name in (client, package) for python in found if python.parts[-3] == name]
    # A distribution's folder spells its name in lower case with underscores, or with dashes if its wheel is old.
    spelling = re.sub(r"[-_.]+", "[-_.]", package.lower()) + r"-[0-9].*\.dist-info"
    having = [python for python in found if _has(python.parent.parent, spelling)]
    return next(iter([*named, *having]), Path(sys.executable))


def _has(environment: Path, spelling: str) -> bool:
    return any(
        re.fullmatch(spelling, path.name.lower()) for path in environment.glob("lib/*/site-packages/*.dist-info")
    )


def python_client(python: Path, client: str, server: Chats) -> dict[str, Any]:
    """The outcome of a Python library's calls, or of a tool's."""
    command = [str(python), str(_FOLDER / "call_clients.py"), client, *server.arguments]
    return _printed(command, {"INGOT_TOKENIZER": str(server.tokenizer)})


def npm_client(folder: Path | None, package: str, server: Chats) -> dict[str, Any]:
    """The outcome of the calls of an npm package, which is installed in a folder."""
    if folder is None:
        return {"missing": "no folder with node_modules is given"}
    script = str(_FOLDER / "call_npm.mjs")
    return _printed(["node", script, package, *server.arguments, str(folder.resolve())], {})


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The rows of docs/serve.md: what each client does, and its failures with their errors."""
    return HEADER + "".join(f"| {client} | {_version(found)} | {_said(found)} |\n" for client, found in results.items())


def _version(found: Mapping[str, Any]) -> str:
    return str(found.get("version", ""))


def _said(found: Mapping[str, Any]) -> str:
    if "calls" not in found:
        return f"did not run: {found.get('missing') or found['failed']}"
    failed = {name: outcome for name, outcome in found["calls"].items() if outcome != "ok"}
    works = ", ".join(name for name in found["calls"] if name not in failed)
    return works + "".join(f"; **{name} fails**: {outcome}" for name, outcome in failed.items())


def _printed(command: list[str], environment: Mapping[str, str]) -> dict[str, Any]:
    done = _run(command, environment)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _run(command: list[str], more: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, **_QUIET, **more}
    environment.pop("PYTHONPATH", None)  # the client's environment has its own packages
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_SECONDS, env=environment, cwd="/"
    )


def write(results: Mapping[str, Mapping[str, Any]], output: Path) -> None:
    """Write the results, and the table into docs/serve.md."""
    calls = [value for outcome in results.values() for value in outcome.get("calls", {}).values()]
    facts = {"clients": len(results), "calls": len(calls), "calls_that_work": calls.count("ok")}
    click.echo(json.dumps(facts))
    found = {"device": device_facts(), **facts, "results": results}
    output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(HEADER)
    after = re.sub(r"\A(\|.*\n)*", "", rest)
    PAGE.write_text(before + table(results) + after, encoding="utf-8")


@click.command(help=__doc__)
@click.argument("artifact", default=str(ROOT / "artifacts/demo"))
@click.option(
    "--environments", type=click.Path(path_type=Path), help="Folder of virtual environments with the clients."
)
@click.option("--npm", type=click.Path(path_type=Path), help="Folder in which the npm packages are installed.")
@click.option("--only", multiple=True, help="A client to call again; the others keep their rows.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS)
def main(artifact: str, environments: Path | None, npm: Path | None, only: tuple[str, ...], output: Path) -> None:
    """Call, print the outcomes and write them."""
    results: dict[str, dict[str, Any]] = json.loads(output.read_text(encoding="utf-8"))["results"] if only else {}
    python_clients = clients()
    npm_clients = {f"{package} (npm)": package for package in NPM_PACKAGES}
    with chat_server(artifact) as server:
        for client in only or (*python_clients, *npm_clients):
            if client in npm_clients:
                results[client] = npm_client(npm, npm_clients[client], server)
            else:
                python = environment_of(client, python_clients[client], environments)
                results[client] = python_client(python, client, server)
            click.echo(f"{client}: {json.dumps(results[client])}")
    write(results, output)


if __name__ == "__main__":
    main()
