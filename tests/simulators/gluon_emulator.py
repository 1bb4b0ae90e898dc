"""Gluon's asynchronous operations for Triton's interpreter: copies, barriers, wgmma, and warps of different roles.

The very source of a kernel runs: `install` replaces its names of these operations. The roles of `gl.warp_specialize`
take turns, and copies arrive, in an order that a random generator draws at every operation. A kernel is right only if
no order can go wrong, so what must be ordered is checked, not whether it happened to be:

    Every access to shared memory is an event. A role knows the events before it: its own, those that its waits for
    wgmma completed, and those known to all who arrived at a barrier when its wait passed. To write a place all earlier
    accesses must be known, to read one its last write; so a wait that is missing, or on another stage, is an error
    whatever the order drawn, as is a second copy into a stage that may still be read.

    wgmma reads through another proxy than copies and stores write (PTX ISA, "Async proxy"): between them must be a
    fence, which makes what a role knows visible; barriers pass this on as well. Loads need none.

Errors, too: roles that all wait for ever; more arrivals than a barrier counts; results of wgmma used before a wait for
them; memory that was never written; copies or multiplications unfinished at the end; more shared memory than exists.

A kernel without `gl.warp_specialize` is one role, "the whole program", and waits for groups of its copies. Its threads
read what others of them copied or may still read: the compiler puts barriers there, so they are not checked. Memory to
which nothing refers any longer is free, as in a compiled kernel: the next allocation may be in its place.

The programs of a launch follow each other; each begins with memory of its own, and is checked at its end.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
from triton.runtime import interpreter

Rows: TypeAlias = slice  # Shared has a method of this name
_interpreter: Any = interpreter  # with names that are not public
SHARED_BYTES = 227 * 1024  # of a program, on SM 90
WARP = 32
_UNIT = 8  # rows of a buffer whose accesses are noted together
_DEFAULT_WARPS = 4  # of the kernel's own function


class EmulationError(AssertionError):
    """A program that a GPU may run wrongly, or never end."""


def _require(condition: object, message: str) -> None:
    if not condition:
        raise EmulationError(message)


@dataclass(eq=False)
class _Role:
    """Warps with a function of their own. Events are bits of whole numbers."""

    name: str
    threads: int
    known: int = 0
    fenced: int = 0
    copies: list["_Copy"] = field(default_factory=list)  # not committed: neither a barrier nor a group has them
    groups: list[list["_Copy"]] = field(default_factory=list)  # the newest last
    multiplying: list["Accumulator"] = field(default_factory=list)

    def end(self) -> None:
        _require(not self.multiplying, f"{self.name} ends without a wait for its multiplications")
        _require(not self.copies, f"{self.name} ends with copies that no barrier counts and no group has")
        _require(not any(self.groups), f"{self.name} ends without a wait for a group of its copies")


@dataclass(eq=False)
class _Barrier:
    """An mbarrier; phase counts how often all have arrived."""

    name: str
    count: int = 0
    missing: int = 0
    phase: int = 0
    coming: tuple[int, int] = (0, 0)  # known and fenced events of the arrivals of this phase
    passed: tuple[int, int] = (0, 0)  # of all earlier phases

    def arrive(self, count: int, known: int, fenced: int) -> None:
        _require(self.count, f"{self.name}: arrival before init")
        self.missing -= count
        _require(self.missing >= 0, f"{self.name}: more arrivals than the {self.count} of a phase")
        self.coming = (self.coming[0] | known, self.coming[1] | fenced)
        if not self.missing:
            self.phase, self.missing, self.passed = self.phase + 1, self.count, self.coming


@dataclass(eq=False)
class _Memory:
    """An allocation [stages, rows, ...]: values, and the events of each _UNIT rows of a stage."""

    name: str
    values: np.ndarray[Any, Any]
    dtype: Any
    writes: np.ndarray[Any, Any]
    reads: np.ndarray[Any, Any]
    poison: Any  # where nothing was written or has arrived: all bits are set, which is NaN in every type of floats
    generic: int = 0  # events that were not through the async proxy


@dataclass(eq=False)
class _Copy:
    """A copy on its way."""

    target: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]
    event: int


@dataclass(eq=False)
class _Arrival:
    """Arrives once the copies before it are there."""

    barrier: _Barrier
    threads: int
    copies: list[_Copy]
    known: int
    fenced: int


class Accumulator:
    """The result of an asynchronous wgmma; only a wait gives it as a tensor."""

    def __init__(self, value: Any, event: int) -> None:
        self.value, self.event = value, event

    def __getattr__(self, name: str) -> Any:
        """Computing with it is an error."""
        raise EmulationError("a result of wgmma is used before a wait for it")


@dataclass(eq=False)
class Shared:
    """A view of shared memory: an allocation, a stage, or some rows of one, perhaps transposed."""

    memory: _Memory
    stage: int | None = None
    rows: Rows = field(default_factory=lambda: slice(None))
    transposed: bool = False

    @property
    def dtype(self) -> Any:
        return self.memory.dtype

    def index(self, number: Any) -> "Shared":
        stage = int(number)
        _require(0 <= stage < len(self.memory.values), f"{self.memory.name} has no stage {stage}")
        return Shared(self.memory, stage)

    def slice(self, start: Any, length: Any) -> "Shared":
        begin, end = int(start), int(start) + int(length)
        _require(begin % _UNIT == end % _UNIT == 0, f"rows {begin} to {end} are not whole units of {_UNIT}")
        return Shared(self.memory, self.stage, slice(begin, end))

    def permute(self, order: tuple[int, int]) -> "Shared":
        assert tuple(order) == (1, 0)
        return Shared(self.memory, self.stage, self.rows, not self.transposed)

    def store(self, value: Any) -> None:
        block().write(self, value.handle.data)

    def load(self, layout: object) -> Any:
        now = block()
        now.pause(lambda: True)
        values, event = now.read(self, is_async=False)
        now.role.known |= event
        return _tensor(values.copy(), self.dtype)

    @property
    def place(self) -> tuple[int, Rows]:
        assert self.stage is not None
        return self.stage, self.rows

    @property
    def units(self) -> tuple[int, Rows]:
        assert self.stage is not None
        start, stop, _ = self.rows.indices(self.memory.values.shape[1])
        return self.stage, slice(start // _UNIT, stop // _UNIT)

    def __str__(self) -> str:
        return f"{self.memory.name}[{self.stage}]"


class _Block:
    """One program: its shared memory, its roles and what is on its way."""

    def __init__(self, rng: np.random.Generator, index: object) -> None:
        self.rng, self.index, self.bytes, self.events = rng, index, 0, 0
        self.allocations = 0
        self.left = 0  # events of copies to memory that is free
        self.arrivals: list[_Arrival] = []
        self.flying: list[_Copy] = []
        self.role = _Role("the whole program", _DEFAULT_WARPS * WARP)
        self.pause: Callable[[Callable[[], bool]], None] = self._let_copies_arrive

    def _let_copies_arrive(self, ready: Callable[[], bool]) -> None:
        """Of the only role: some copies, or as many as it waits for."""
        while self.flying and (not ready() or self.rng.random() < 0.3):
            self.land(self.flying[int(self.rng.integers(len(self.flying)))])
        _require(ready(), f"all wait for ever: {self.role.name}")

    def allocate(self, kind: str, size: int) -> str:
        """The name of new memory of so many bytes."""
        _require(not self.left & ~self.role.known, "memory is allocated where copies may be on their way")
        self.bytes, self.allocations = self.bytes + size, self.allocations + 1
        _require(self.bytes <= SHARED_BYTES, f"{self.bytes} bytes of shared memory, and there are {SHARED_BYTES}")
        return f"{kind} {self.allocations - 1}"

    def free(self, size: int, writes: np.ndarray[Any, Any]) -> None:
        self.bytes -= size
        self.left |= int(np.bitwise_or.reduce(writes, axis=None))

    def event(self) -> int:
        self.events += 1
        return 1 << self.events

    def write(self, at: Shared, values: np.ndarray[Any, Any], *, is_async: bool = False) -> int:
        """Note a write; an asynchronous one is not known to its own role before a barrier says so."""
        memory, units, event = at.memory, at.units, self.event()
        earlier = int(np.bitwise_or.reduce(memory.writes[units] | memory.reads[units]))
        unread = int(np.bitwise_or.reduce(memory.reads[units])) & ~self.role.known
        _require(not unread, f"{self.role.name} writes {at}, which may still be read")
        _require(not earlier & ~self.role.known, f"{self.role.name} writes {at}, which may still be written")
        memory.writes[units], memory.reads[units] = event, 0
        memory.generic |= event
        memory.values[at.place] = memory.poison if is_async else values
        if not is_async:
            self.role.known |= event
        return event

    def read(self, at: Shared, *, is_async: bool = True) -> tuple[np.ndarray[Any, Any], int]:
        """Note a read; one through the async proxy ends with a wait for its multiplication."""
        memory, units, event = at.memory, at.units, self.event()
        _require(memory.writes[units].all(), f"{self.role.name} reads {at}, which was never written")
        written = int(np.bitwise_or.reduce(memory.writes[units]))
        _require(not written & ~self.role.known, f"{self.role.name} reads {at} without having waited for it")
        is_visible = not (is_async and written & ~self.role.fenced)
        _require(is_visible, f"{self.role.name} reads {at} without a fence after the wait")
        memory.reads[units] |= event
        values = memory.values[at.place]
        return (values.T if at.transposed else values), event

    def land(self, copy: _Copy) -> None:
        """A copy arrives, and with it those who waited for it alone."""
        copy.target[...] = copy.values
        self.flying.remove(copy)
        for arrival in [one for one in self.arrivals if not any(copy in self.flying for copy in one.copies)]:
            self.arrivals.remove(arrival)
            arrival.barrier.arrive(arrival.threads, arrival.known, arrival.fenced)

    def finish(self) -> None:
        self.role.end()
        _require(not self.flying and not self.arrivals, "the program ends with copies on their way")


_launch = _interpreter.GridExecutor.__call__
_rng = [np.random.default_rng(0)]
_current: list[_Block] = []


def seed(number: int) -> None:
    """Draw the orders of the next programs from this seed."""
    _rng[0] = np.random.default_rng(number)


def block() -> _Block:
    """The program that runs."""
    index = _interpreter.interpreter_builder.grid_idx  # set before each program, to another object
    if not _current or _current[0].index is not index:
        _finish_program()
        _current.append(_Block(_rng[0], index))
    return _current[0]


def _finish_program() -> None:
    if _current:
        _current.pop().finish()


def _checked_launch(*arguments: Any, **constants: Any) -> None:
    """Launch a kernel, and check its last program that used the emulator, as `block` does the others."""
    try:
        _launch(*arguments, **constants)
        _finish_program()
    finally:
        _current.clear()


def allocate_shared_memory(dtype: Any, shape: Sequence[Any], layout: object) -> Shared:
    """Allocate [stages, rows, ...], not written yet."""
    sizes = [int(getattr(size, "value", size)) for size in shape]
    stages, rows = sizes[:2]
    now = block()
    _require(rows % _UNIT == 0, f"{rows} rows are not a multiple of {_UNIT}")
    kind = np.dtype(_interpreter._get_np_dtype(dtype))
    poison = np.frombuffer(b"\xff" * kind.itemsize, kind)[0]
    values = np.full(sizes, poison, kind)
    writes, reads = (np.full((stages, rows // _UNIT), 0, object) for _ in range(2))
    memory = _Memory(now.allocate("buffer", values.nbytes), values, dtype, writes, reads, poison)
    weakref.finalize(memory, now.free, values.nbytes, writes)
    return Shared(memory)


class _Barriers:
    """Barriers of one allocation."""

    def __init__(self, count: int) -> None:
        name = block().allocate("barriers", 8 * count)
        self.each = [_Barrier(f"{name}[{number}]") for number in range(count)]

    def index(self, number: Any) -> _Barrier:
        return self.each[int(number)]


def _init(barrier: _Barrier, count: Any) -> None:
    _require(not barrier.count, f"{barrier.name} is initialized twice")
    barrier.count = barrier.missing = int(getattr(count, "value", count))


def _wait(barrier: _Barrier, phase: Any, pred: Any = True) -> None:
    """Until the phase with this parity has ended: at once if the current one has the other parity."""
    if not bool(pred):
        return
    parity, now = int(phase), block()
    now.pause(lambda: barrier.phase % 2 != parity)
    now.role.known |= barrier.passed[0]
    now.role.fenced |= barrier.passed[1]


def _arrive(barrier: _Barrier, count: int = 1, pred: Any = True) -> None:
    now = block()
    now.pause(lambda: True)
    if bool(pred):
        barrier.arrive(count, now.role.known, now.role.fenced)


def _async_copy(target: Shared, pointers: Any, mask: Any = None) -> None:
    """Copy to shared memory; zeros where the mask is false."""
    import triton.language as tl

    now = block()
    now.pause(lambda: True)
    values = (tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0)).handle.data
    _require(values.dtype == target.memory.values.dtype, f"{values.dtype} is copied to {target} of {target.dtype}")
    copy = _Copy(target.memory.values[target.place], values, now.write(target, values, is_async=True))
    now.role.copies.append(copy)
    now.flying.append(copy)


def _arrive_after_copies(barrier: _Barrier, increment_count: bool = True) -> None:
    """Every thread of the role arrives when its copies so far are there."""
    now = block()
    _require(not increment_count, "arrivals that raise the barrier's count are not emulated")
    role = now.role
    known = role.known | sum(copy.event for copy in role.copies)
    arrival = _Arrival(barrier, role.threads, list(role.copies), known, role.fenced)
    role.copies.clear()
    if any(copy in now.flying for copy in arrival.copies):
        now.arrivals.append(arrival)
    else:
        barrier.arrive(arrival.threads, arrival.known, arrival.fenced)
    now.pause(lambda: True)


def _commit_group() -> None:
    role = block().role
    role.groups.append(role.copies)
    role.copies = []


def _wait_group(count: Any = 0) -> None:
    """Until all groups but the newest `count` are there."""
    now = block()
    role = now.role
    done = role.groups[: max(len(role.groups) - int(count), 0)]
    del role.groups[: len(done)]
    copies = [copy for group in done for copy in group]
    now.pause(lambda: not any(copy in now.flying for copy in copies))
    role.known |= sum(copy.event for copy in copies)


def fence_async_shared() -> None:
    """Let wgmma see all writes that are known."""
    block().role.fenced |= block().role.known


def _matrix(operand: Any) -> tuple[np.ndarray[Any, Any], int]:
    if isinstance(operand, Shared):
        return block().read(operand)
    _require(not isinstance(operand, Accumulator), "a result of wgmma is used before a wait for it")
    return operand.handle.data, 0


def _tensor(values: np.ndarray[Any, Any], dtype: Any) -> Any:
    import triton.language as tl

    return tl.tensor(interpreter.TensorHandle(values, dtype), tl.block_type(dtype, list(values.shape)))


def warpgroup_mma(left: Any, right: Any, total: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
    """total + left @ right, rounded to float32 once: sums in float64, where no order of 16-bit factors rounds."""
    import triton.language as tl

    now = block()
    now.pause(lambda: True)
    _require(isinstance(right, Shared), "the right operand of wgmma is in shared memory")
    (a, first), (b, second) = _matrix(left), _matrix(right)
    sums = a.astype(np.float64) @ b.astype(np.float64)
    if use_acc:
        _require(not isinstance(total, Accumulator), "a result of wgmma is used before a wait for it")
        sums += total.handle.data
    value = _tensor(sums.astype(np.float32), tl.float32)
    pending = Accumulator(value, first | second)
    if is_async:
        now.role.multiplying.append(pending)
        return pending
    now.role.known |= pending.event
    return value


def warpgroup_mma_wait(count: int = 0, deps: Sequence[Any] = ()) -> Any:
    """Wait until `count` multiplications are unfinished; those of `deps` must not be among them."""
    now = block()
    role = now.role
    done = role.multiplying[: len(role.multiplying) - int(count)]
    role.multiplying = role.multiplying[len(done) :]
    for one in done:
        role.known |= one.event
    _require(
        not any(one in role.multiplying for one in deps if isinstance(one, Accumulator)),
        f"{role.name} waits for another multiplication than the one whose result it takes",
    )
    now.pause(lambda: True)
    found = tuple(one.value if isinstance(one, Accumulator) else one for one in deps)
    return found[0] if len(found) == 1 else found


class _Turns:
    """Roles as threads of which one runs at a time; which one, and which copies arrive, is drawn."""

    def __init__(self, now: _Block, functions: Sequence[tuple[Any, tuple[Any, ...]]], threads: Sequence[int]) -> None:
        self.block, self.error = now, list[BaseException]()
        names = [getattr(function, "__name__", "role").lstrip("_") for function, _ in functions]
        start = now.role
        self.roles = [
            _Role(f"{name} {number}", count, start.known, start.fenced)
            for number, (name, count) in enumerate(zip(names, threads, strict=True))
        ]
        self.ready: dict[int, Callable[[], bool]] = dict.fromkeys(range(len(functions)), lambda: True)
        self.go = [threading.Semaphore(0) for _ in functions]
        self.back = threading.Semaphore(0)
        self.running = 0
        self.threads = [
            threading.Thread(target=self._run, args=(number, *one), daemon=True) for number, one in enumerate(functions)
        ]

    def _run(self, number: int, function: Any, arguments: tuple[Any, ...]) -> None:
        self.go[number].acquire()
        try:
            if not self.error:
                function(*arguments)
                self.roles[number].end()
        except BaseException as error:  # noqa: BLE001  raised again where the roles began
            self.error.append(error)
        del self.ready[number]
        self.back.release()

    def pause(self, ready: Callable[[], bool]) -> None:
        number = self.running
        self.ready[number] = ready
        self.back.release()
        self.go[number].acquire()
        if self.error:
            raise EmulationError("stopped")

    def run(self) -> None:
        """Until all roles have ended; the first error of one is raised."""
        now = self.block
        for thread in self.threads:
            thread.start()
        outer, now.pause = (now.role, now.pause), self.pause
        while self.ready:
            able = [number for number, ready in self.ready.items() if self.error or ready()]
            if now.flying and not self.error and (not able or now.rng.random() < 0.3):
                now.land(now.flying[int(now.rng.integers(len(now.flying)))])
                continue
            if not able:
                waiting = ", ".join(self.roles[number].name for number in self.ready)
                self.error.append(EmulationError(f"all wait for ever: {waiting}"))
                continue
            self.running = int(now.rng.choice(able))
            now.role = self.roles[self.running]
            self.go[self.running].release()
            self.back.acquire()
        now.role, now.pause = outer
        if self.error:
            raise self.error[0]
        while now.flying:
            now.land(now.flying[0])


def warp_specialize(functions: Sequence[tuple[Any, tuple[Any, ...]]], warps: Sequence[int], registers: object) -> None:
    """Run each function in warps of its own; the first in those of the kernel."""
    _Turns(block(), functions, [count * WARP for count in (_DEFAULT_WARPS, *warps)]).run()


class _Language:
    """Gluon's language as the interpreter has it, with what it lacks."""

    allocate_shared_memory = staticmethod(allocate_shared_memory)
    warp_specialize = staticmethod(warp_specialize)

    def __init__(self, usual: Any) -> None:
        self._usual = usual

    def __getattr__(self, name: str) -> Any:
        return getattr(self._usual, name)

    @staticmethod
    def barrier() -> None:
        """A role is one thing here."""


def install(module: ModuleType) -> None:
    """Let a kernel's module run by the emulator; once."""
    names: Any = module
    _interpreter.GridExecutor.__call__ = _checked_launch
    if isinstance(names.gl, _Language):
        return
    names.gl = _Language(names.gl)
    names.mbarrier = SimpleNamespace(
        allocate_mbarrier=lambda batch: _Barriers(int(batch)), init=_init, wait=_wait, arrive=_arrive
    )
    names.async_load = _async_copy
    names.async_copy = SimpleNamespace(
        mbarrier_arrive=_arrive_after_copies, commit_group=_commit_group, wait_group=_wait_group
    )
    names.fence_async_shared = fence_async_shared
    names.warpgroup_mma, names.warpgroup_mma_wait = warpgroup_mma, warpgroup_mma_wait
