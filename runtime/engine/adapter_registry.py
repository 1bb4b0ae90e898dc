"""The adapters of an engine by name: registered, found for a request, read again where memory for them is limited."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ingot.errors import AdapterError, shown, unknown
from ingot.runtime.adapters import Adapter, read_adapter
from ingot.runtime.executors import AdaptingExecutor, Executor

MAX_NAME_CHARS = 256


@dataclass(frozen=True)
class AdapterFacts:
    """An adapter that requests can name."""

    name: str
    path: str
    digest: str
    rank: int
    num_bytes: int


class AdapterRegistry:
    """Adapters by name. `read` may be called by any thread, the rest by the engine's alone.

    max_in_memory   matrices of at most so many are kept in memory, of those that were used last; the others are read
                    again when a request names them. None: all

    A request has its adapter from its arrival on: one that is removed or replaced later still serves it.
    """

    def __init__(self, executor: Executor, max_in_memory: int | None = None) -> None:
        self._executor = executor if isinstance(executor, AdaptingExecutor) and executor.max_adapters else None
        self._max_in_memory = max_in_memory
        self._facts: dict[str, AdapterFacts] = {}
        self._in_memory: dict[str, Adapter] = {}  # by digest, the least recently used first

    @property
    def all(self) -> Mapping[str, AdapterFacts]:
        """Those that requests can name."""
        return self._facts

    def read(self, name: str, path: Path) -> Adapter:
        """Read a folder that PEFT saved. AdapterError when it cannot be used with this engine."""
        _require_name(name)
        if self._executor is None:
            raise AdapterError(
                f"the adapter {shown(name)} cannot be loaded: this engine computes none; with max_adapters above 0 it"
                " does for artifacts built with cpu.engine: native, or for a target cuda-smXX with gpu.adapters: true."
                " Or merge the adapter at build time (adapter: in the recipe)"
            )
        adapter = read_adapter(name, path, self._executor.projections)
        if adapter.rank > self._executor.max_adapter_rank:
            raise AdapterError(
                f"the adapter {shown(name)} has the rank {adapter.rank}; max_adapter_rank is"
                f" {self._executor.max_adapter_rank}: raise it"
            )
        return adapter

    def add(self, adapter: Adapter, path: Path, *, replace: bool = False) -> str | None:
        """Let requests name it. Returns the digest that no name has any more, where it replaces another's.

        AdapterError for a name that another adapter has, unless `replace`, and for one that never fits the memory.
        """
        if self._executor is not None and self._executor.adapter_share(adapter) > 1:
            raise AdapterError(
                f"the adapter {shown(adapter.name)} does not fit the memory for adapters; raise adapter_bytes"
            )
        known = self._facts.get(adapter.name)
        if known and known.digest != adapter.digest and not replace:
            raise AdapterError(
                f"the adapter {shown(adapter.name)} is loaded from {known.path} with other contents; unload it first,"
                " or replace it"
            )
        facts = AdapterFacts(adapter.name, str(path), adapter.digest, adapter.rank, adapter.num_bytes)
        self._facts[adapter.name] = facts
        self._keep(adapter)
        return self._dropped(known)

    def remove(self, name: str) -> str | None:
        """Forget a name. Returns the digest that no name has any more. AdapterError for an unknown name."""
        self.require(name)
        return self._dropped(self._facts.pop(name))

    def require(self, name: str) -> AdapterFacts:
        """Facts of a name; AdapterError for an unknown one."""
        found = self._facts.get(name)
        if found is None:
            raise AdapterError(unknown("adapter", name, self._facts, "loaded adapters"))
        return found

    def find(self, name: str) -> Adapter:
        """The adapter of a request. AdapterError for an unknown name, or for a folder that has changed since."""
        facts = self.require(name)
        adapter = self._in_memory.get(facts.digest)
        if adapter is None:
            adapter = self.read(name, Path(facts.path))
            if adapter.digest != facts.digest:
                raise AdapterError(
                    f"the adapter {shown(name)} has changed in {facts.path} since it was loaded; load it again"
                )
        self._keep(adapter)
        return adapter

    def _keep(self, adapter: Adapter) -> None:
        self._in_memory.pop(adapter.digest, None)
        self._in_memory[adapter.digest] = adapter
        while self._max_in_memory is not None and len(self._in_memory) > self._max_in_memory:
            del self._in_memory[next(iter(self._in_memory))]

    def _dropped(self, before: AdapterFacts | None) -> str | None:
        if before is None or any(each.digest == before.digest for each in self._facts.values()):
            return None
        self._in_memory.pop(before.digest, None)
        return before.digest


def _require_name(name: object) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise AdapterError(
            f"an adapter is named {shown(name)}; a name has 1 to {MAX_NAME_CHARS} characters that can be printed"
        )
