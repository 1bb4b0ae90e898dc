"""Compiles every kernel for dependent launches, and prints where their PTX reads and writes memory before it waits.

Runs as a process of its own: a process whose Triton interprets kernels cannot compile them. Prints JSON: names of
kernels, how often each waits, and the arguments that it reaches memory through before the first wait.
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


def distinct() -> Iterator[Kernel]:
    """The first form of each kernel; of one that may load through a ring, the first of these too."""
    seen = set[tuple[str, bool]]()
    for kernel in requests():
        form = kernel.name, int(kernel.constants.get("AHEAD", 0)) > 2
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


def reached_before_waiting(ptx: str, kernel: Kernel) -> tuple[int, list[str]]:
    """How often the code waits, and the arguments that it reaches memory through before the first wait."""
    lines = ptx.splitlines()
    waits = [number for number, line in enumerate(lines) if "griddepcontrol.wait" in line]
    before = lines[: waits[0]] if waits else lines
    places, names = sources(before), list(SIGNATURES[kernel.name].arguments)
    accesses = [access[1] for line in before if (access := _ACCESS.search(line) or _COPY.search(line))]
    assert all(places.get(register) for register in accesses), "an address that comes from no argument"
    return len(waits), sorted({names[number] for register in accesses for number in places[register]})


if __name__ == "__main__":
    found = []
    for kernel in distinct():
        ptx = compile_by_triton(kernel, DEPENDENT_FROM).asm["ptx"]
        found.append((kernel.name, *reached_before_waiting(ptx, kernel)))
    print(json.dumps(found))
