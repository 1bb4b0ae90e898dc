"""How a long pass tells how far it is, without an option for it: observing never changes the program.

with progress_to(callback):
    manager.run(model)
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from ingot.progress import Progress, detail, note, silent

_listener: ContextVar[Progress] = ContextVar("ingot.passes.progress", default=silent)


@contextmanager
def progress_to(listener: Progress) -> Iterator[None]:
    """Send what passes report within the block to the listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report_progress(name: str, done: int, total: int) -> None:
    """Called by a pass after each unit of work; name, done and total as ingot.progress has them."""
    _listener.get()(name, done, total)


def report_error(name: str, layer: str, nearest: float, after: float) -> None:
    """Called by a pass that rounds a layer: the error of its outputs, rounded to the nearest and as the pass did it."""
    detail(name, f"{layer} {nearest:.2%} -> {after:.2%}")


def report_kept(name: str, layer: str, kept: int, of: int, error: float) -> None:
    """Called by a pass that prunes a layer: what it kept, and the error of its outputs."""
    detail(name, f"{layer} keeps {kept} of {of}, {error:.2%}")


def note_errors(name: str, errors: Mapping[str, tuple[float, float]]) -> None:
    """Called at a pass's end: tells the user what it gained, from the same errors by layer."""
    if not errors:
        return
    nearest, after = (sum(pair[at] for pair in errors.values()) / len(errors) for at in (0, 1))
    worst = max(errors, key=lambda layer: errors[layer][1])
    note(
        f"{name}: error of the outputs of {len(errors)} layers on the calibration data {after:.2%} on average, "
        f"{nearest:.2%} when rounded to the nearest; the largest {errors[worst][1]:.2%}, {worst}"
    )
