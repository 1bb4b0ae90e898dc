"""Types of a recipe's values: paths, and counts with their ranges."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from ingot.artifact.section import as_whole
from ingot.artifact.serving import MOST_STEP_TOKENS
from ingot.settings import MAX_THREADS
from ingot.validation.options import MOST_TOKENS


@dataclass(frozen=True)
class RecipePath:
    """A path as the recipe gives it, and the folder that it is relative to."""

    given: str
    folder: Path

    def __str__(self) -> str:
        return self.given

    @property
    def path(self) -> Path:
        """The path, normalized; `~` is the home folder."""
        return Path(os.path.normpath(self.folder / Path(self.given).expanduser()))


GivenPath = Annotated[RecipePath, PlainSerializer(str, return_type=str), WithJsonSchema({"type": "string"})]
WholeNumber = Annotated[int, BeforeValidator(as_whole)]
MOST_TEXT_TOKENS = 1_000_000_000
MOST_SEED = (1 << 63) - 1
Rows = Annotated[int, Field(ge=1, le=MOST_STEP_TOKENS), BeforeValidator(as_whole)]
ContextTokens = Annotated[int, Field(ge=1, le=MOST_TOKENS), BeforeValidator(as_whole)]
Generations = Annotated[int, Field(ge=0, le=MOST_TOKENS), BeforeValidator(as_whole)]
TextTokens = Annotated[int, Field(ge=0, le=MOST_TEXT_TOKENS), BeforeValidator(as_whole)]
Threads = Annotated[int, Field(ge=1, le=MAX_THREADS), BeforeValidator(as_whole)]
