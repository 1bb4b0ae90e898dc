"""Counts the steps of one stage for a progress callback, which knows from done and total how long the rest takes."""

from dataclasses import dataclass

from ingot.progress import Progress


@dataclass
class Stage:
    """Reports its start and every step."""

    name: str
    total: int
    report: Progress
    done: int = 0

    def __post_init__(self) -> None:
        self.advance(0)

    def advance(self, steps: int = 1) -> None:
        """Say that `steps` more are done."""
        self.done += steps
        self.report(self.name, self.done, self.total)
