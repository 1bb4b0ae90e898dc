"""Runs the PTX of a compiled kernel on the CPU, a block of threads at a time: what the compiler made, not its source.

For kernels without divergent branches, with multiplications of m16n8k16 in 16-bit floats, and with shared memory that
only asynchronous copies write. Every access of memory is checked: an address outside the buffers, or not aligned to its
access, ends in an error. So does an access of shared memory that depends on which thread is faster.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Lanes = Any  # an array with a value of each thread
_TYPES: Mapping[str, type] = {
    **{f"u{8 * 2**at}": getattr(np, f"uint{8 * 2**at}") for at in range(4)},
    **{f"b{8 * 2**at}": getattr(np, f"uint{8 * 2**at}") for at in range(4)},
    **{f"s{8 * 2**at}": getattr(np, f"int{8 * 2**at}") for at in range(4)},
    "f32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
}
Statement = tuple[str | None, str, list[str]]  # predicate, name, operands
_STATEMENT = re.compile(r"(?:(@!?%\w+)\s+)?([a-z][\w.:]*)\s*(.*)")
_COMPARED: Mapping[str, Callable[[Lanes, Lanes], Lanes]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "hs": np.greater_equal,
}  # fmt: skip
_BINARY: Mapping[str, Callable[[Lanes, Lanes], Lanes]] = {
    "add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum,
    "div": np.floor_divide, "rem": np.remainder,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


@dataclass
class Memory:
    """Buffers at addresses of their own."""

    buffers: list[NDArray[np.uint8]] = field(default_factory=list)

    def add(self, array: NDArray[np.generic]) -> int:
        """Place an array, which the kernel then reads and writes, and return its address."""
        self.buffers.append(array.reshape(-1).view(np.uint8))
        return len(self.buffers) << 32

    def load(self, addresses: Lanes, size: int) -> NDArray[np.uint8]:
        """Bytes [len(addresses), size]."""
        content = np.empty((len(addresses), size), np.uint8)
        for buffer, lanes, places in self._places(addresses, size):
            content[lanes] = buffer[places]
        return content

    def store(self, addresses: Lanes, content: NDArray[np.uint8]) -> None:
        """Store content [len(addresses), size]."""
        for buffer, lanes, places in self._places(addresses, content.shape[1]):
            buffer[places] = content[lanes]

    def _places(self, addresses: Lanes, size: int) -> Iterator[tuple[NDArray[np.uint8], Lanes, Lanes]]:
        """Each buffer, which of the addresses are in it, and indices [addresses, size] of its bytes."""
        numbers, offsets = addresses >> 32, addresses & 0xFFFFFFFF
        for number in np.unique(numbers):
            assert 0 < number <= len(self.buffers), f"address {number << 32:#x} is in no buffer"
            buffer, lanes = self.buffers[number - 1], numbers == number
            places = offsets[lanes]
            assert (places % size == 0).all(), f"{size} bytes are not aligned"
            assert places.max() + size <= len(buffer), f"{places.max()} is outside a buffer of {len(buffer)} bytes"
            yield buffer, lanes, places[:, None] + np.arange(size)


_SHARED_ADDRESS = 0x410
"""Of a block's shared memory: no more aligned than its declaration."""
_NOBODY, _SEVERAL = -1, -2


@dataclass
class Shared:
    """Shared memory of a block, written by asynchronous copies.

    Threads run in step here, but not on a GPU: a thread may read what another wrote, or overwrite what another read,
    only after a barrier. A copy is the write of its thread at the thread's wait for it, and until then the place has no
    value. Numbers of threads, one for each byte, are of those accesses that no barrier has followed.
    """

    size: int

    def __post_init__(self) -> None:
        self.content: NDArray[np.uint8] = np.zeros(self.size, np.uint8)
        self.is_written: NDArray[np.bool_] = np.zeros(self.size, bool)
        self.copier, self.writer, self.reader = (np.full(self.size, _NOBODY) for _ in range(3))
        # Copies of each group that no wait has completed: places, threads, content. The last group is not committed.
        self.groups: list[list[tuple[Lanes, Lanes, Lanes]]] = [[]]

    def load(self, addresses: Lanes, threads: Lanes, size: int) -> NDArray[np.uint8]:
        """Bytes [len(addresses), size]; _SEVERAL as a thread is all threads of a warp."""
        places, owner = self._places(addresses, size), threads[:, None]
        assert (self.copier[places] == _NOBODY).all(), "a read of a place whose copy no wait has completed"
        assert self.is_written[places].all(), "a read of a place that nothing was written to"
        assert _is_alone(self.writer[places], owner), "a read without a barrier after another thread's write"
        before = self.reader[places]
        self.reader[places] = owner
        is_shared = (self.reader[places] != owner) | (before != _NOBODY) & (before != owner)
        self.reader[places[is_shared]] = _SEVERAL
        return self.content[places]

    def copy(self, addresses: Lanes, threads: Lanes, content: NDArray[np.uint8]) -> None:
        """Begin to copy content [len(addresses), size]."""
        places, owner = self._places(addresses, content.shape[1]), threads[:, None]
        assert (self.copier[places] == _NOBODY).all(), "two copies to one place at once"
        assert _is_alone(self.writer[places], owner), "a copy without a barrier after another thread's write"
        assert _is_alone(self.reader[places], owner), "a copy without a barrier after another thread's read"
        self.copier[places] = owner
        assert (self.copier[places] == owner).all(), "two threads copy to one place"
        self.groups[-1].append((places, owner, content))

    def commit(self) -> None:
        """End each thread's group of copies."""
        self.groups.append([])

    def wait(self, pending: int) -> None:
        """Complete the copies of all committed groups but the newest `pending`."""
        completed = max(len(self.groups) - 1 - pending, 0)
        for places, owner, content in chain.from_iterable(self.groups[:completed]):
            self.content[places], self.is_written[places] = content, True
            self.copier[places], self.writer[places] = _NOBODY, owner
        del self.groups[:completed]

    def barrier(self) -> None:
        """Order all accesses before it and all accesses after it."""
        self.writer[:] = self.reader[:] = _NOBODY

    def _places(self, addresses: Lanes, size: int) -> Lanes:
        """Indices [len(addresses), size] of bytes."""
        offsets = (addresses & 0xFFFFFFFF) - _SHARED_ADDRESS
        assert (offsets % size == 0).all(), f"{size} bytes of shared memory are not aligned"
        assert ((offsets >= 0) & (offsets + size <= self.size)).all(), f"outside {self.size} bytes of shared memory"
        return offsets[:, None] + np.arange(size)


def _is_alone(found: Lanes, owner: Lanes) -> bool:
    return bool(((found == _NOBODY) | (found == owner)).all())


@dataclass
class Block:
    """A block of threads of a kernel at one place of the grid."""

    memory: Memory
    parameters: Sequence[int | np.float32]
    place: tuple[int, int, int]
    grid: tuple[int, int, int]
    threads: int
    shared: Shared
    registers: dict[str, Lanes] = field(default_factory=dict)

    def run(self, code: list[Statement], labels: dict[str, int]) -> None:
        """Run all instructions of a kernel."""
        at = 0
        while at < len(code):
            predicate, name, operands = code[at]
            at += 1
            active = self._active(predicate)
            opcode, *modifiers = name.split(".")
            if opcode == "ret":
                assert active.all()
                return
            if opcode == "bra":
                assert active.all() or not active.any(), "threads branch apart"
                at = labels[operands[0]] if active.all() else at
            elif hasattr(self, f"_{opcode}"):
                getattr(self, f"_{opcode}")(modifiers, operands, active)
            else:
                self._arithmetic(opcode, modifiers, operands)

    def _active(self, predicate: str | None) -> NDArray[np.bool_]:
        if predicate is None:
            return np.ones(self.threads, bool)
        value: NDArray[np.bool_] = self.registers[predicate.lstrip("@!")].astype(bool)
        return ~value if predicate.startswith("@!") else value

    def _read(self, operand: str, kind: str) -> Lanes:
        """The value of a register, a special register or an immediate, its lowest bits as `kind`."""
        dtype = np.dtype(_TYPES[kind])
        if operand.startswith("%tid"):
            bits = np.arange(self.threads, dtype=np.uint64) * (operand[-1] == "x")
        elif operand.startswith(("%ctaid", "%nctaid")):
            sizes = self.grid if operand.startswith("%n") else self.place
            bits = np.full(self.threads, sizes["xyz".index(operand[-1])], np.uint64)
        elif operand in self.registers:
            bits = self.registers[operand]
        elif operand == "global_smem":
            bits = np.full(self.threads, _SHARED_ADDRESS, np.uint64)
        elif operand.startswith("0f"):
            bits = np.full(self.threads, int(operand[2:], 16), np.uint64)
        else:
            bits = np.full(self.threads, int(operand, 0) & 0xFFFFFFFFFFFFFFFF, np.uint64)
        raw = bits.astype(np.uint64).astype(f"u{dtype.itemsize}")
        return raw.view(dtype)

    def _write(self, operand: str, value: Lanes, kind: str) -> None:
        typed: Lanes = np.ascontiguousarray(value, _TYPES[kind])
        assert typed.shape == (self.threads,), typed.shape
        self.registers[operand] = typed.view(f"u{typed.itemsize}").astype(np.uint64)

    def _arithmetic(self, opcode: str, modifiers: list[str], operands: list[str]) -> None:
        kind = modifiers[-1]
        if kind.endswith("x2"):
            self._pairs(opcode, kind[:-2], operands)
            return
        target, *sources = operands
        if kind == "pred":
            given = [self.registers[one] for one in sources]
            self.registers[target] = _BINARY[opcode](*given)
            return
        values = [self._read(one, kind) for one in sources]
        with np.errstate(over="ignore"):
            self._write(target, self._result(opcode, modifiers, kind, values), kind)

    def _result(self, opcode: str, modifiers: list[str], kind: str, values: list[Lanes]) -> Lanes:
        if opcode in _BINARY:
            return _BINARY[opcode](*values)
        if opcode == "shl":
            return values[0] << values[1].astype(values[0].dtype)
        if opcode == "shr":
            return values[0] >> values[1].astype(values[0].dtype)
        if opcode == "not":
            return ~values[0]
        if opcode == "neg":
            return -values[0]
        if opcode == "lop3":
            assert values[3][0] == 0xEA, "only (a & b) | c"
            return values[0] & values[1] | values[2]
        if opcode == "bfe":
            return values[0] >> values[1] & ((1 << int(values[2][0])) - 1)
        if opcode == "fma":
            return (values[0].astype(np.float64) * values[1] + values[2]).astype(_TYPES[kind])
        if opcode == "mul" and kind == "f32":
            return values[0] * values[1]
        raise NotImplementedError(f"{opcode}.{'.'.join(modifiers)}")

    def _mul(self, modifiers: list[str], operands: list[str], active: NDArray[np.bool_]) -> None:
        self._multiplied(modifiers, operands, None)

    def _mad(self, modifiers: list[str], operands: list[str], active: NDArray[np.bool_]) -> None:
        self._multiplied(modifiers, operands[:3], operands[3])

    def _multiplied(self, modifiers: list[str], operands: list[str], added: str | None) -> None:
        kind, is_wide = modifiers[-1], "wide" in modifiers or "hi" in modifiers
        result = f"{kind[0]}{2 * int(kind[1:])}" if is_wide else kind
        exact = _TYPES.get(result, object)  # Python's integers, for 128 bits
        left, right = (self._read(one, kind).astype(exact) for one in operands[1:3])
        with np.errstate(over="ignore"):
            total = left * right
            if "hi" in modifiers:
                total, result = total >> int(kind[1:]), kind
            self._write(operands[0], total if added is None else total + self._read(added, result), result)

    def _pairs(self, opcode: str, kind: str, operands: list[str]) -> None:
        """Two 16-bit floats of a register; results are rounded once."""
        assert opcode == "fma"
        halves = [self._halves(one, kind) for one in operands[1:]]
        result: Lanes = (halves[0] * halves[1] + halves[2]).astype(_TYPES[kind])
        self._write(operands[0], np.ascontiguousarray(result).view(np.uint32)[:, 0], "u32")

    def _halves(self, operand: str, kind: str) -> NDArray[np.float64]:
        """[threads, 2], the low half first."""
        words: NDArray[np.generic] = np.ascontiguousarray(self._read(operand, "u32"))[:, None]
        return words.view(_TYPES[kind]).astype(np.float64)

    def _mov(self, modifiers: list[str], operands: list[str], active: NDArray[np.bool_]) -> None:
        kind, (target, source) = modifiers[-1], operands
        if kind == "pred":
            given = self.registers.get(source)
            self.registers[target] = np.full(self.threads, int(source, 0) != 0) if given is None else given
        elif source.startswith("{"):
            low, high = (self._read(one, "u16").astype(np.uint32) for one in _listed(source))
            self._write(target, low | high << np.uint32(16), "u32")
        elif target.startswith("{"):
            word = self._read(source, "u32")
            for place, name in enumerate(_listed(target)):
                self._write(name, (word >> np.uint32(16 * place)).astype(np.uint16), "u16")
        else:
            self._write(target, self._read(source, kind), kind)

    def _setp(self, modifiers: list[str], operands: list[str], active: NDArray[np.bool_]) -> None:
        left, right = (self._read(one, modifiers[1]) for one in operands[1:3])
        self.registers[operands[0]] = _COMPARED[modifiers[0]](left, right)

    def _selp(self, modifiers: list[str], operands: list[str], active: NDArray[np.bool_]) -> None:
        left, right = (self._read(one, modifiers[0]) for one in operands[1:3])
        self._write(operands[0], np.where(self.registers[operands[3]].astype(bool), left, right), modifiers[0])

    def _cvt(self, modifiers: list[str], operands: list[str], active: NDArray[np.bool_]) -> None:
        target, source = modifiers[-2:]
        self._write(operands[0], self._read(operands[1], source).astype(_TYPES[target]), target)

    def _ld(self, modifiers: list[str], operands: list[str], active: NDArray[np.bool_]) -> None:
        kind, target = modifiers[-1], operands[0]
        if modifiers[0] == "param":
            value = self.parameters[int(operands[1].strip("[]").rsplit("_", 1)[1])]
            bits = value.view(np.uint32) if isinstance(value, np.float32) else np.uint64(value)
            self.registers[target] = np.full(self.threads, bits, np.uint64)
            return
        assert modifiers[0] in ("global", "shared"), modifiers
        names = _listed(target)
        size = np.dtype(_TYPES[kind]).itemsize
        loaded = np.stack([self.registers.get(name, np.zeros(self.threads, np.uint64)) for name in names])
        threads = np.flatnonzero(active)
        addresses, width = self._lanes(operands[1])[threads], size * len(names)
        is_shared = modifiers[0] == "shared"
        content = self.shared.load(addresses, threads, width) if is_shared else self.memory.load(addresses, width)
        loaded[:, threads] = content.view(f"u{size}").T
        for name, value in zip(names, loaded, strict=True):
            self.registers[name] = value

    def _st(self, modifiers: list[str], operands: list[str], active: NDArray[np.bool_]) -> None:
        assert modifiers[0] == "global", modifiers
        kind, names = modifiers[-1], _listed(operands[1])
        size = np.dtype(_TYPES[kind]).itemsize
        values = np.stack([self._read(name, f"u{8 * size}") for name in names])
        content = np.ascontiguousarray(values[:, active].T).view(np.uint8)
        self.memory.store(self._lanes(operands[0])[active], content)

    def _bar(self, modifiers: list[str], operands: list[str], active: NDArray[np.bool_]) -> None:
        """All threads run in step."""
        assert (modifiers, operands) == (["sync"], ["0"]), "only barriers of all threads"
        assert active.all(), "some threads never reach a barrier"
        self.shared.barrier()

    def _cp(self, modifiers: list[str], operands: list[str], active: NDArray[np.bool_]) -> None:
        """An asynchronous copy to shared memory, the end of a group of copies, or the wait for groups."""
        if modifiers == ["async", "cg", "shared", "global"]:
            self._copy(operands, active)
            return
        assert active.all(), "some threads have other groups of copies"
        if modifiers == ["async", "commit_group"]:
            self.shared.commit()
        elif modifiers == ["async", "wait_group"]:
            self.shared.wait(int(operands[0], 0))
        else:
            raise NotImplementedError(f"cp.{'.'.join(modifiers)}")

    def _copy(self, operands: list[str], active: NDArray[np.bool_]) -> None:
        """Copy as many bytes as the source has, then zeros."""
        target, source = (self._lanes(one)[active] for one in operands[:2])
        size, source_sizes = int(operands[2], 0), self._read(operands[3], "u32")[active]
        assert (source % size == 0).all(), f"{size} bytes are not aligned"
        content = np.zeros((len(source), size), np.uint8)
        for given in filter(None, np.unique(source_sizes)):
            lanes = source_sizes == given
            content[lanes, :given] = self.memory.load(source[lanes], given)
        self.shared.copy(target, np.flatnonzero(active), content)

    def _ldmatrix(self, modifiers: list[str], operands: list[str], active: NDArray[np.bool_]) -> None:
        """Load 8 by 8 matrices of each warp, whose rows are at addresses of its first threads.

        Thread 4 g + t gets elements 2 t and 2 t + 1 of row g, or of column g when transposed.
        """
        names, warps = _listed(operands[0]), self.threads // 32
        is_transposed = "trans" in modifiers
        form = ["sync", "aligned", "m8n8", f"x{len(names)}", *["trans"] * is_transposed, "shared", "b16"]
        assert modifiers == form, modifiers
        assert active.all(), "some threads load no matrix"
        addresses = self._lanes(operands[1]).reshape(warps, 32)[:, : 8 * len(names)].reshape(-1)
        rows = self.shared.load(addresses, np.full(len(addresses), _SEVERAL), 16)
        matrices: Lanes = rows.view(np.uint16).reshape(warps, len(names), 8, 8)
        matrices = np.ascontiguousarray(matrices.swapaxes(2, 3) if is_transposed else matrices)
        for place, name in enumerate(names):
            self._write(name, matrices.view(np.uint32)[:, place].reshape(-1), "u32")

    def _lanes(self, operand: str) -> NDArray[np.int64]:
        """The address of each thread."""
        base, _, offset = (part.strip() for part in operand.strip("[] ").partition("+"))
        addresses: NDArray[np.int64] = self._read(base, "u64").astype(np.int64) + int(offset or 0)
        return addresses

    def _mma(self, modifiers: list[str], operands: list[str], active: NDArray[np.bool_]) -> None:
        """D [16, 8] = A [16, 16] @ B [16, 8] + C of each warp; fragments as the PTX ISA defines them for m16n8k16."""
        assert "m16n8k16" in modifiers
        kind, warps = modifiers[-2], self.threads // 32
        a, b = ([self._halves(name, kind).reshape(warps, 8, 4, 2) for name in _listed(one)] for one in operands[1:3])
        left, right, total = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8)), np.zeros((warps, 16, 8))
        for place, part in enumerate(a):  # [warp, group, thread of it, of two]
            row, column = place % 2 * 8, place // 2 * 8
            left[:, row : row + 8, column : column + 8] = part.reshape(warps, 8, 8)
        for place, part in enumerate(b):
            right[:, place * 8 : place * 8 + 8] = part.reshape(warps, 8, 8).swapaxes(1, 2)
        c: Lanes = np.stack([self._read(name, "f32") for name in _listed(operands[3])], axis=-1).reshape(warps, 8, 4, 4)
        for half in range(2):
            total[:, half * 8 : half * 8 + 8] = c[..., 2 * half : 2 * half + 2].reshape(warps, 8, 8)
        result: Lanes = (left @ right + total).astype(np.float32)
        for place, name in enumerate(_listed(operands[0])):
            lanes = result[:, place // 2 * 8 : place // 2 * 8 + 8].reshape(warps, 8, 4, 2)[..., place % 2]
            self._write(name, lanes.reshape(-1), "f32")


def _parsed(ptx: str) -> tuple[list[Statement], dict[str, int]]:
    """Statements of the only kernel's body, and the index of the statement after each label."""
    body = ptx[ptx.index("{") :]
    code: list[Statement] = []
    labels: dict[str, int] = {}
    for line in body.splitlines():
        text = line.split("//")[0].strip().removeprefix("{").strip()
        if label := re.fullmatch(r"(\$\w+):", text):
            labels[label[1]] = len(code)
            continue
        for statement in map(str.strip, text.split(";")):
            if found := _STATEMENT.fullmatch(statement):  # not a declaration, which begins with a dot
                code.append((found[1], found[2], _operands(found[3])))
    return code, labels


def _operands(text: str) -> list[str]:
    """Split at commas outside braces."""
    return [one.strip() for one in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", text)]


def _listed(operand: str) -> list[str]:
    return [one.strip() for one in operand.strip("{} ").split(",")]


def run_grid(
    ptx: str,
    memory: Memory,
    parameters: Sequence[int | np.float32],
    grid: tuple[int, int, int],
    threads: int,
    shared_bytes: int = 0,
) -> None:
    """Run every block of a grid of the only kernel in `ptx`, one after the other."""
    code, labels = _parsed(ptx)
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(grid[0]):
                Block(memory, parameters, (x, y, z), grid, threads, Shared(shared_bytes)).run(code, labels)
