"""`ingot serve`: options to a running server, until it is asked to stop."""

import asyncio
import gc
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import ingot
from ingot.artifact import open_artifact
from ingot.cli.console import print_note
from ingot.cli.engine_options import engine_options
from ingot.errors import UsageError, shown
from ingot.runtime import AsyncEngine
from ingot.runtime.server import life
from ingot.runtime.server.access import ApiKeys
from ingot.runtime.server.event_loop import event_loop
from ingot.runtime.server.models import Models, ServedModel
from ingot.runtime.server.options import ServerOptions
from ingot.runtime.server.service import Service


def serve_command(
    artifact: str,
    more_artifacts: tuple[str, ...],
    host: str,
    port: int,
    aliases: tuple[str, ...],
    api_keys: Path | None,
    speculate: str | None,
    settings: tuple[str, ...],
    no_verify: bool,
    **limits: object,
) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit code."""
    options = ServerOptions(**limits)  # type: ignore[arg-type]  # click checked the types; values are checked there
    keys = ApiKeys.read(api_keys) if api_keys else None
    names = _aliases(aliases)
    engine = engine_options(settings)
    listening = life.listen(host, port)

    def load() -> Models:
        with ExitStack() as loaded:
            models = []
            for path in (artifact, *more_artifacts):
                opened = open_artifact(path, verify=not no_verify)
                if opened.manifest.warning:
                    print_note(opened.manifest.warning)
                served = AsyncEngine.load(opened, speculation=speculate, **engine)  # type: ignore[arg-type]
                loaded.callback(_close, served)
                models.append(ServedModel(opened.manifest.name, served, options))
            found = Models(models, names)
            loaded.pop_all()  # the server closes them
            _leave_to_the_end()
            return found

    def report(models: Models) -> None:
        print_note(f"{', '.join(models.by_name)}: ready on {life.address_of(listening)}")

    print_note(f"loading, on {life.address_of(listening)}")
    with asyncio.Runner(loop_factory=event_loop) as runner:
        runner.run(life.run(Service(options, ingot.__version__), listening, load, keys=keys, on_ready=report))
    return 0


def _leave_to_the_end() -> None:
    """Take what is loaded out of the reach of Python's collector: modules and models live as long as the server.

    It would visit some 100,000 objects each time, and all steps wait for it. Not for a library to do: `Engine` cannot
    know what else the process holds.
    """
    gc.collect()
    gc.freeze()


def _close(engine: AsyncEngine) -> None:
    asyncio.run(engine.close())


def _aliases(given: Sequence[str]) -> dict[str, str]:
    """Names of models by their aliases."""
    aliases: dict[str, str] = {}
    for each in given:
        alias, separator, name = each.partition("=")
        if not separator or not alias or not name:
            raise UsageError(f"--alias {shown(each)} is not ALIAS=MODEL, such as gpt-4o-mini=chat")
        if alias in aliases:
            raise UsageError(f"--alias {shown(alias)} is given twice")
        aliases[alias] = name
    return aliases
