"""Compiles every kernel for dependent launches, and prints where their PTX reads and writes memory before it waits.

Runs as a process of its own: a process whose Triton interprets kernels cannot compile them. Prints JSON: names of
kernels, whether they load through a ring, how often they wait, and the arguments that they reach memory through on a
way without a wait.
"""

import json
import re
from collections.abc import Iterator, Sequence

from ingot.artifact.programs.launch_program import DEPENDENT_FROM, Kernel
from ingot.pipeline.targets.cuda.cubins import compile_by_triton
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from tests.pipeline.targets.cuda.compile_all import requests

_ACCESS = re.compile(r"\b(?:ld|st|atom|red|prefetch)\.\S*global\S* .*?\[ ?(%\w+)")
_COPY = re.compile(r"\bcp\.async\S*global\S* .*?\], \[ ?(%\w+)")
_PARAMETER = re.compile(r"ld\.param\.\S+\s+(%\w+), \[\w+_param_(\d+)\]")
_REGISTER = re.compile(r"%\w+")
_LABEL = re.compile(r"(\$\w+):")
_BRANCH = re.compile(r"\s*(@!?%\w+)?\s*bra(?:\.uni)?\s+(\$\w+);")
_WAIT = "griddepcontrol.wait"


def loads_through_a_ring(kernel: Kernel) -> bool:
    """Report if it copies codes to shared memory (kernels/matmul_int4.py)."""
    return int(kernel.constants.get("AHEAD", 0)) > 2


def distinct() -> Iterator[Kernel]:
    """The first form of each kernel, of one that folds partials, and of one that loads through a ring."""
    seen = set[tuple[str, bool, bool]]()
    for kernel in requests():
        form = kernel.name, bool(kernel.constants.get("FOLDS")), loads_through_a_ring(kernel)
        if form not in seen:
            seen.add(form)
            yield kernel.model_copy(update={"constants": {**kernel.constants, "DEPENDENT": True}})


def sources(lines: Sequence[str]) -> dict[str, set[int]]:
    """Numbers of the parameters that each register may come from, whatever the way through the code."""
    found: dict[str, set[int]] = {}
    for line in lines:
        if parameter := _PARAMETER.search(line):
            found[parameter[1]] = {int(parameter[2])}
    changed = True
    while changed:
        changed = False
        for line in lines:
            target, *given = _REGISTER.findall(re.sub(r"@!?%\w+", "", line)) or [""]
            more = set[int]().union(*(found.get(register, set()) for register in given))
            if more - found.get(target, set()):
                found[target] = found.get(target, set()) | more
                changed = True
    return found


def before_waiting(lines: Sequence[str]) -> list[str]:
    """The lines that some way through the code reaches without a wait."""
    labels = {label[1]: number for number, line in enumerate(lines) if (label := _LABEL.match(line))}
    found, begins = set[int](), [0]
    while begins:
        at = begins.pop()
        while at < len(lines) and at not in found and _WAIT not in lines[at]:
            found.add(at)
            branch = _BRANCH.match(lines[at])
            if branch:
                begins.append(labels[branch[2]])
            if (branch and not branch[1]) or lines[at].strip() == "ret;":
                break
            at += 1
    return [lines[number] for number in sorted(found)]


def reached_before_waiting(ptx: str, kernel: Kernel) -> tuple[int, list[str]]:
    """How often the code waits, and the arguments that it reaches memory through without having waited."""
    lines = ptx.splitlines()
    if SIGNATURES[kernel.name].worker_warps or kernel.constants.get("FOLDS"):
        # Warps of other roles have code of their own, and begin when those that waited let them. Where partials are
        # folded each part waits, and no launch has a program without a part.
        before = lines[: next(number for number, line in enumerate(lines) if _WAIT in line)]
    else:
        before = before_waiting(lines)
    places, names = sources(before), list(SIGNATURES[kernel.name].arguments)
    accesses = [access[1] for line in before if (access := _ACCESS.search(line) or _COPY.search(line))]
    assert all(places.get(register) for register in accesses), "an address that comes from no argument"
    reached = sorted({names[number] for register in accesses for number in places[register]})
    return sum(_WAIT in line for line in lines), reached


if __name__ == "__main__":
    found = []
    for kernel in distinct():
        ptx = compile_by_triton(kernel, DEPENDENT_FROM).asm["ptx"]
        found.append((kernel.name, loads_through_a_ring(kernel), *reached_before_waiting(ptx, kernel)))
    print(json.dumps(found))
