"""The parts of the benchmark in their order, and what a part consists of: tasks, each of which may fail alone.

Nothing here imports Ingot or a package: the process that starts the parts must run where packages are missing.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

Record = dict[str, object]
WHEELS = "wheels"  # folder of packed wheels, next to the programs
COMMIT_FILE = "COMMIT"  # the commit of a copy of the repository that is not a checkout


class OutOfTimeError(Exception):
    """Raised by a task that ends early because the time is up: it counts as one that did not run."""


@dataclass(frozen=True)
class Task:
    """One thing that a part does: its name, unique within the part, and a function that yields records.

    seconds    the most that it may take: a task that takes longer hangs, and its process is killed
    least      it does not start with less time left than this
    """

    name: str
    run: Callable[[], Iterable[Record]]
    seconds: float = 60.0
    least: float = 2.0


@dataclass(frozen=True)
class Part:
    """One part.

    function       "module:function": a `device.Bench`, or without `needs_device` the worker's order -> tasks
    seconds        the most that the part may take
    is_proof       whether the kernels count as right only if all its tasks ran and no record is beyond its limit
    failed_in      parts whose failed and wrong tasks it takes
    environment    of its process, besides the usual
    """

    function: str
    seconds: float
    is_proof: bool = False
    by_default: bool = True
    needs_device: bool = True
    failed_in: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


_INTERPRETED = {"TRITON_INTERPRET": "1"}  # launches are caught in Triton's interpreter, or compared with it
_BLOCKING = {"INGOT_CUDA_BLOCKING": "1"}  # launches one by one, none from a graph

# First what shows whether kernels are right, cheapest first; then times, by what they decide.
PARTS: Mapping[str, Part] = {
    "imports": Part("benchmarks.gpu.imports:imports", 60, is_proof=True, needs_device=False),
    "load": Part("benchmarks.gpu.proofs.load:load", 60, is_proof=True),
    "kernels": Part("benchmarks.gpu.proofs.kernel_cases:kernel_cases", 60, is_proof=True, environment=_INTERPRETED),
    "shapes": Part("benchmarks.gpu.proofs.shapes:shapes", 120, is_proof=True),
    "ladder": Part("benchmarks.gpu.proofs.ladder:ladder", 60, failed_in=("shapes",)),
    "check": Part("benchmarks.gpu.proofs.check:check", 160, is_proof=True, environment=_INTERPRETED | _BLOCKING),
    "demo": Part("benchmarks.gpu.proofs.demo:demo", 60, is_proof=True),
    "invariance": Part("benchmarks.gpu.proofs.invariance:invariance", 60, is_proof=True),
    "verify": Part("benchmarks.gpu.proofs.verify:verify", 400, is_proof=True),
    "dependent": Part("benchmarks.gpu.times.dependent:dependent", 90, is_proof=True),
    "sanitizer": Part(
        "benchmarks.gpu.sanitizer:sanitizer",
        120,
        needs_device=False,
        failed_in=("load", "kernels", "shapes", "check"),
    ),
    "hardware": Part("benchmarks.gpu.times.hardware:hardware", 30),
    "steps": Part("benchmarks.gpu.times.steps:steps", 240),
    "gap": Part("benchmarks.gpu.times.gap:gap", 60),
    "offload": Part("benchmarks.gpu.times.offload:offload", 60),
    "slow-part": Part("benchmarks.gpu.times.slow_part:slow_part", 60),
    "torch": Part("benchmarks.gpu.times.torch_peer:peers", 120),
    "torch-compile": Part("benchmarks.gpu.times.torch_peer:compiled_peers", 120),
    "tune": Part("benchmarks.gpu.times.tune:tune", 480),
    "other-steps": Part("benchmarks.gpu.times.other_steps:other_steps", 300, by_default=False),
    "attention": Part("benchmarks.gpu.times.attention:attention", 240, by_default=False),
}
BY_DEFAULT = tuple(name for name, part in PARTS.items() if part.by_default)
