"""Contents of a cubin, by disassembly: instructions of its main loop, registers, spills, widths of loads.

The disassemblers come with Triton's wheel. ptxas unrolls short loops, so a turn of a loop in the cubin may be several
turns of the kernel's: divide by `Loop.multiplications` or by the bytes it loads, not by turns.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
_LABEL = re.compile(r"\s*\.(L_x_\d+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?);")
_BRANCH = re.compile(r"BRA\S*\s.*?\(?\.?(L_x_\d+)")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
_CONDITION = re.compile(r"^BRA\S*\s+!?U?P\w+,")  # a branch's predicate as its operand
_WARP_MMA = re.compile(r"^[HIQ]MMA\.(?:SP\.)?(16816|1688|16832|16864)\b")  # of a warp: m, n, k without separators
_GROUP_MMA = re.compile(r"^[HIQ]GMMA\.(\d+)x(\d+)x(\d+)\b")  # of four warps
_WAIT = re.compile(r"^DEPBAR\.LE SB0, (0x[0-9a-f]+)")
_SIZES = {"1688": 16 * 8 * 8, "16816": 16 * 8 * 16, "16832": 16 * 8 * 32, "16864": 16 * 8 * 64}


@dataclass(frozen=True)
class Loop:
    """The instructions of a loop, without predicates: one warp, one turn.

    shortest    instructions on the shortest way through a turn: branches over what only some turns need are taken
    """

    instructions: tuple[str, ...]
    shortest: int = 0

    @property
    def counts(self) -> Mapping[str, int]:
        """Instructions by name without modifiers, most frequent first."""
        return dict(Counter(text.split()[0].split(".")[0] for text in self.instructions).most_common())

    @property
    def multiplications(self) -> int:
        """Multiplications by tensor cores, of one warp."""
        return sum(map(_multiplications, self.instructions))

    @property
    def barriers(self) -> int:
        """Barriers of all warps."""
        return sum(text.startswith(("BAR.", "WARPSYNC")) for text in self.instructions)

    @property
    def in_flight(self) -> int:
        """Groups of copies to shared memory that may be unfinished when a turn goes on; 0 where it waits for all."""
        return max((int(found[1], 16) for found in map(_WAIT.match, self.instructions) if found), default=0)

    @property
    def loads(self) -> Mapping[str, int]:
        """Loads by kind and bits a thread: {"LDG.128": 4, "LDS.32": 8}; LDGSTS copies to shared memory."""
        return dict(sorted(Counter(filter(None, map(_load, self.instructions))).items()))

    def __len__(self) -> int:
        return len(self.instructions)


@dataclass(frozen=True)
class Sass:
    """A disassembled kernel. `main` is its innermost loop with most multiplications, or with most instructions."""

    instructions: tuple[str, ...]
    loops: tuple[Loop, ...]
    registers: int
    spilled_bytes: int

    @property
    def main(self) -> Loop:
        """The loop that the kernel spends its time in; the whole kernel if it has no loop."""
        return max(self.loops, key=_weight, default=Loop(self.instructions))

    @property
    def outside(self) -> int:
        """Instructions outside the main loop."""
        return len(self.instructions) - len(self.main)


def _weight(loop: Loop) -> tuple[int, int]:
    """Most multiplications, and of those the innermost; without multiplications the longest."""
    return loop.multiplications, -len(loop) if loop.multiplications else len(loop)


def disassemble(cubin: bytes) -> Sass:
    """Disassemble a cubin of one kernel."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _run("nvdisasm", "-c", file.name)
        usage = _USAGE.search(_run("cuobjdump", "-res-usage", file.name))
    assert usage is not None
    instructions, loops = parse(text.splitlines())
    return Sass(instructions, loops, int(usage[1]), int(usage[2]))


def parse(lines: Sequence[str]) -> tuple[tuple[str, ...], tuple[Loop, ...]]:
    """Return all instructions and the loops; a loop ends with a branch back to its label."""
    labels: dict[str, int] = {}
    found: list[str] = []
    always = set[int]()  # instructions without a predicate
    for line in lines:
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif instruction := _INSTRUCTION.search(line):
            text = instruction[1].strip()
            if not _PREDICATE.match(text) and not _CONDITION.match(text):
                always.add(len(found))
            found.append(_PREDICATE.sub("", text))
    targets = {
        index: labels.get(branch[1], index) for index, text in enumerate(found) if (branch := _BRANCH.search(text))
    }
    loops = []
    for index, target in targets.items():
        if target < index:
            shortest = _shortest(target, index, targets, always)
            loops.append(Loop(tuple(found[target : index + 1]), shortest))
    return tuple(found), tuple(loops)


def _shortest(first: int, last: int, targets: Mapping[int, int], always: Set[int]) -> int:
    """Fewest instructions from one to another, both counted, by branches forward; 0 if no way leads there."""
    steps = {first: 1}
    for index in range(first, last):
        if index in steps:
            target = targets.get(index, index)
            ways = [target] if index < target <= last else []
            if index not in targets or index not in always:
                ways.append(index + 1)
            for way in ways:
                steps[way] = min(steps.get(way, last), steps[index] + 1)
    return steps.get(last, 0)


def _multiplications(text: str) -> int:
    if found := _WARP_MMA.match(text):
        return _SIZES[found[1]]
    if found := _GROUP_MMA.match(text):
        return int(found[1]) * int(found[2]) * int(found[3]) // 4
    return 0


def _load(text: str) -> str | None:
    """LDG.128 for `LDG.E.128.CONSTANT R4, ...`; None for another instruction."""
    name, *modifiers = text.split()[0].split(".")
    if name not in ("LDG", "LDS", "LDL", "LDGSTS", "LDSM", "UTMALDG"):
        return None
    if name == "LDSM":
        return f"LDSM.x{modifiers[-1]}"
    sizes = [one for one in modifiers if re.fullmatch(r"[US]?(8|16|32|64|128)", one)]
    return f"{name}.{sizes[0].lstrip('US') if sizes else 32}"


def _run(tool: str, *arguments: str) -> str:
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return subprocess.run([folder / tool, *arguments], capture_output=True, text=True, check=True).stdout
