"""Paths as recipes give them: relative to the file that they stand in."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import PlainSerializer


@dataclass(frozen=True)
class RecipePath:
    """A path as the recipe gives it, and the folder that it is relative to."""

    given: str
    folder: Path

    def __str__(self) -> str:
        return self.given

    @property
    def path(self) -> Path:
        """Where it points; `~` is the home folder."""
        return Path(os.path.normpath(self.folder / Path(self.given).expanduser()))


GivenPath = Annotated[RecipePath, PlainSerializer(str, return_type=str)]
