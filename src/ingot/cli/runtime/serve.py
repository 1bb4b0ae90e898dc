"""`ingot serve`: options to a running server, until it is asked to stop."""

import asyncio
import gc
import logging
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import ingot
from ingot.artifact import Artifact, Manifest, open_artifact
from ingot.artifact.open_files import HeldArtifact
from ingot.cli.command import naming_options
from ingot.cli.engine_options import engine_options
from ingot.cli.runtime.build_to_serve import artifact_of, needs_build
from ingot.cli.runtime.server_log import LogFormat, server_log
from ingot.cli.sources import named_artifact
from ingot.errors import AdapterError, ArtifactError, IngotError, UsageError, shown, shown_path, unknown
from ingot.progress import note
from ingot.runtime import AsyncEngine
from ingot.runtime.server import lifecycle
from ingot.runtime.server.event_loop import event_loop
from ingot.runtime.server.http.access import KeyFiles
from ingot.runtime.server.models.served_models import Models, ServedModel, require_names
from ingot.runtime.server.options import ServerOptions
from ingot.runtime.server.service import Service
from ingot.runtime.server.watch.request_log import RequestLog
from ingot.runtime.speculation_options import SpeculationOptions
from ingot.runtime.thread_scheduling import all_cores, avoid_core

_log = logging.getLogger(__name__)


def serve_command(log_format: LogFormat, **given: Any) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit code. The log is JSON to its end, the error that ends it too."""
    _survive_hangups()
    with server_log(log_format):
        try:
            return _serve(**given)
        except IngotError as error:
            if log_format == "text":
                raise
            _log.critical("%s", error)
            return error.exit_code


def _survive_hangups() -> None:
    """Until the server reloads at SIGHUP, let it have no effect: the artifacts are being loaded.

    A signal that is ignored stays so: the server is to outlive its terminal (nohup).
    """
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, lambda number, frame: None)


def _serve(
    artifact: str,
    more_artifacts: tuple[str, ...],
    host: str,
    port: int,
    aliases: tuple[str, ...],
    chat_template: Path | None,
    api_keys: Path | None,
    admin_keys: Path | None,
    speculate: str | None,
    processes: Mapping[str, int | None],
    settings: tuple[str, ...],
    lora_modules: tuple[str, ...],
    no_verify: bool,
    engine_process: bool,
    verify_new: bool,
    log_requests: bool,
    trace: bool,
    **limits: object,
) -> int:
    with naming_options():
        options = ServerOptions(**limits)  # type: ignore[arg-type]  # click checked the types; values are checked there
    key_files = KeyFiles(api_keys, admin_keys)
    _require_updates_allowed(options.lora_folder, admin_keys)
    names = _aliases(aliases)
    engine = engine_options(settings, speculate, processes)
    if chat_template:
        engine["chat_template"] = chat_template
    adapters = _adapters(lora_modules, len(more_artifacts))
    given = [named_artifact(each) for each in (artifact, *more_artifacts)]
    if any(needs_build(path) for _, path in given):
        lifecycle.listen(host, port).close()  # a port that is taken is refused before minutes of work
    paths = _paths([(name, artifact_of(path)) for name, path in given], names, adapters)
    listening = lifecycle.listen(host, port)
    with naming_options():
        lifecycle.web_rules(options, listening, host, has_keys=api_keys is not None)

    loader = _Loader(options, engine, engine_process=engine_process, verifies=not no_verify, verify_new=verify_new)

    def load() -> Models:
        with ExitStack() as loaded:
            models = []
            for name, path in paths.items():
                models.append(loader.first(name, path, adapters.get(name) or adapters.get("", {})))
                loaded.callback(_close, models[-1].engine)
            found = Models(models, names)
            loaded.pop_all()  # the server closes them
            _leave_to_the_end()
            return found

    def reload(name: str, is_new: bool) -> ServedModel:
        before = service.models.by_name[name]
        return loader.new(paths[name], before) if is_new else loader.same(before)

    def report(models: Models) -> None:
        note(f"{', '.join(models.by_name)}: ready on {lifecycle.address_of(listening)}")

    note(f"loading, on {lifecycle.address_of(listening)}")
    with ExitStack() as ended, asyncio.Runner(loop_factory=event_loop) as runner:
        service = Service(options, ingot.__version__)
        service.key_files = key_files
        if log_requests:
            request_log = RequestLog(ended.enter_context(FileIO(sys.stdout.fileno(), "w", closefd=False)))
            service.observers.append(request_log)
            ended.callback(request_log.close)
        if trace:
            from ingot.runtime.server.watch.tracing import Tracing

            tracing = Tracing(ingot.__version__)
            service.observers.append(tracing)
            ended.callback(tracing.close)
        users, administrators = key_files.users, key_files.administrators
        runner.run(
            lifecycle.run(
                service,
                listening,
                load,
                keys=users,
                admin_keys=administrators,
                reload=reload,
                evidence_change=loader.evidence_change,
                host=host,
                on_ready=report,
            )
        )
    return 0


@dataclass(frozen=True)
class _Loader:
    """Loads the models of a server: at the start, again after a failure or idle time, and new ones at a reload."""

    options: ServerOptions
    engine: Mapping[str, object]
    _: KW_ONLY
    engine_process: bool
    verifies: bool
    verify_new: bool
    _held: WeakKeyDictionary[ServedModel, tuple[HeldArtifact, HeldArtifact | None]] = field(
        default_factory=WeakKeyDictionary
    )

    def first(self, name: str, path: str, adapters: Mapping[str, str]) -> ServedModel:
        """Load what is in a folder as the model of a name, with adapters by name from theirs."""
        return self._loaded(name, self._opened(path), self._opened_draft(), adapters)

    def new(self, path: str, before: ServedModel) -> ServedModel:
        """Load what is in a folder now. UsageError for another model, and for one that does not pass its gates."""
        artifact, name = self._opened(path), before.name
        manifest = artifact.manifest
        if before.artifact and not _are_of_one_model(before.artifact.manifest, manifest):
            raise UsageError(f"{path} has the model {shown(manifest.name)} now; {shown(name)} is served from it")
        if manifest.warning and self.verifies:
            raise UsageError(f"{path}: {manifest.warning}; --no-verify serves it nevertheless")
        if self.verify_new:
            _verify(str(artifact.path))
        adapters = {each.name: each.path for each in before.engine.adapters.values()}
        return self._loaded(name, artifact, self._opened_draft(), adapters)

    def same(self, before: ServedModel) -> ServedModel:
        """Load a model again that was served, whatever is in its folder by now. ArtifactError if it is gone.

        Adapters that have changed or are gone are left out.
        """
        held, held_draft = self._held[before]
        try:
            artifact = held.reopened()
            draft = held_draft.reopened() if held_draft else None
        except ArtifactError as error:
            raise ArtifactError(
                f"what was served is not there any more ({error}); a reload, by SIGHUP or POST /admin/reload, serves"
                " what is there now if it passes the checks"
            ) from error
        if artifact.path != held.artifact.path:
            _log.warning("%s has other files now; what was served is read from those that are open", held.artifact.path)
        adapters = before.engine.adapters.values()
        digests = {each.name: each.digest for each in adapters}
        model = self._load(before.name, artifact, draft, {each.name: each.path for each in adapters}, digests)
        self._held[model] = held, held_draft
        return model

    def _loaded(
        self, name: str, artifact: Artifact, draft: Artifact | None, adapters: Mapping[str, str]
    ) -> ServedModel:
        held = HeldArtifact(artifact), HeldArtifact(draft) if draft else None
        model = self._load(name, artifact, draft, adapters)
        self._held[model] = held
        return model

    def evidence_change(self, old: ServedModel, new: ServedModel) -> str | None:
        """Return `validation.evidence_change`; the folder of the old one may have the new one by now."""
        from ingot.validation.evidence_change import evidence_change

        return evidence_change(*(self._held[model][0].by_open_files() for model in (old, new)))

    def _opened(self, path: str | Path) -> Artifact:
        """Open an artifact by its real path: a link may lead elsewhere when it is loaded again."""
        return open_artifact(Path(path).resolve(), verify=self.verifies)

    def _opened_draft(self) -> Artifact | None:
        return self._opened(self._speculation.draft) if self._speculation else None  # type: ignore[arg-type]

    @property
    def _speculation(self) -> SpeculationOptions | None:
        """The options of speculation with a draft model."""
        options = self.engine.get("speculation")
        return options if isinstance(options, SpeculationOptions) and options.draft is not None else None

    def _load(
        self,
        name: str,
        artifact: Artifact,
        draft: Artifact | None,
        adapters: Mapping[str, str],
        digests: Mapping[str, str] | None = None,
    ) -> ServedModel:
        manifest, engine = artifact.manifest, dict(self.engine)
        if manifest.warning:
            _log.warning("%s", manifest.warning)
        if self._speculation and draft:
            engine["speculation"] = self._speculation.with_draft(draft)
        load_engine = AsyncEngine.load_in_process if self.engine_process else AsyncEngine.load
        served = load_engine(artifact, **engine)  # type: ignore[arg-type]
        if served.process:
            served.process.on_move = partial(avoid_core, served.process.pid)
        try:
            if adapters:
                asyncio.run(_load_adapters(served, adapters, digests))
            return ServedModel(name, served, self.options, artifact, draft)
        except BaseException:
            _close(served)
            raise


def _require_updates_allowed(lora_folder: Path | None, admin_keys: Path | None) -> None:
    """Raise UsageError where adapters may be loaded from a folder that does not exist, or without a key."""
    if lora_folder is None:
        return
    if not lora_folder.is_dir():
        raise UsageError(f"--allow-lora-updates {shown_path(lora_folder)} is not a folder; create it first")
    if admin_keys is None:
        raise UsageError("--allow-lora-updates takes the keys of --admin-keys FILE; give it, too")


def _paths(
    given: Sequence[tuple[str | None, str]], aliases: Mapping[str, str], adapters: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Folders of artifacts by the names of their models. Checks all names, before anything is loaded."""
    manifests = [open_artifact(path, verify=False).manifest for _, path in given]
    names = [name or manifest.name for (name, _), manifest in zip(given, manifests, strict=True)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UsageError(f"two models are named {shown(twice)}; {_renaming([path for _, path in given], names, twice)}")
    require_names(names, aliases, [name for of_model in adapters.values() for name in of_model])
    other = next((model for model in adapters if model and model not in names), None)
    if other:
        raise UsageError(f"--lora-modules: {unknown('model', other, names, 'models')}")
    return {name: path for name, (_, path) in zip(names, given, strict=True)}


def _renaming(paths: Sequence[str], names: Sequence[str], twice: str) -> str:
    """The arguments that serve models of one name, each under one of its own."""
    words: list[str] = []
    for path, name in zip(paths, names, strict=True):
        own = (
            name if name != twice else re.sub(r"[^A-Za-z0-9._-]", "-", Path(path).resolve().name).lstrip("-._") or name
        )
        while any(word.startswith(f"{own}=") for word in words):
            own += "-2"
        words.append(f"{own}={path}")
    return f"give each a name of its own: ingot serve {shlex.join(words)}"


def _are_of_one_model(before: Manifest, now: Manifest) -> bool:
    """Return whether two artifacts may be of one model: by their name, or by what no pass changes."""
    facts = ("family", "vocab_size", "hidden_size")
    return before.name == now.name or all(getattr(before.model, fact) == getattr(now.model, fact) for fact in facts)


def _leave_to_the_end() -> None:
    """Take what is loaded out of the reach of Python's collector: modules and models live as long as the server.

    It would visit some 100,000 objects each time, and all steps wait for it. Not for a library to do: `Engine` cannot
    know what else the process holds.
    """
    gc.collect()
    gc.freeze()


def _verify(path: str) -> None:
    """Run `ingot verify --quick` on an artifact in a process of its own. UsageError when it does not pass."""
    command = [sys.executable, "-m", "ingot", "verify", path, "--quick"]
    with all_cores():
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UsageError(f"{path} does not pass ingot verify --quick: {reason}")


async def _load_adapters(engine: AsyncEngine, given: Mapping[str, str], digests: Mapping[str, str] | None) -> None:
    """Load adapters into an engine.

    With `digests`, where an engine starts again, one that fails or has changed since is left out and logged; otherwise
    it is an error.
    """
    for name, path in given.items():
        try:
            facts = await engine.load_adapter(name, path)
            if digests is not None and facts.digest != digests[name]:
                await engine.unload_adapter(name)
                raise AdapterError(f"the adapter {shown(name)} has changed in {path} since it was loaded")
        except AdapterError as error:
            if digests is None:
                raise
            _log.error("%s; it is not served any more", error)


def _adapters(given: Sequence[str], more_models: int) -> dict[str, dict[str, str]]:
    """Folders by name, by the model that each changes: "" for the only one."""
    found: dict[str, dict[str, str]] = {}
    for each in given:
        name, separator, path = each.partition("=")
        name, _, model = name.partition("@")
        if not separator or not name or not path:
            raise UsageError(f"--lora-modules {shown(each)} is not NAME=FOLDER, such as sql=adapters/sql")
        if more_models and not model:
            raise UsageError(f"--lora-modules {shown(each)}: several models are served; give NAME@MODEL=FOLDER")
        if name in found.setdefault(model, {}):
            raise UsageError(f"--lora-modules {shown(name)} is given twice")
        found[model][name] = path
    return found


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
