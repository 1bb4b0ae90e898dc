"""Import what every part needs, so that a missing package shows before the GPU is used."""

from collections.abc import Iterator
from functools import partial
from importlib import import_module

from benchmarks.gpu.parts import PARTS, Record, Task

_LATER = {  # what a part imports when it runs
    "load": ("ingot.runtime.cuda.driver.driver", "cuda.bindings.driver"),
    "kernels": ("tests.kernels.all_cases",),
    "check": ("ingot.kernels.matmul", "ingot.kernels.sampling"),
}


def imports(order: object) -> list[Task]:
    """One task per part."""
    return [Task(name, partial(_imported, name)) for name in PARTS if name != "imports"]


def modules_of(part: str) -> tuple[str, ...]:
    """The modules that a part imports."""
    return (PARTS[part].function.partition(":")[0], *_LATER.get(part, ()))


def _imported(part: str) -> Iterator[Record]:
    for module in modules_of(part):
        import_module(module)
    yield {"figure": "imported", "for": part, "modules": list(modules_of(part))}
