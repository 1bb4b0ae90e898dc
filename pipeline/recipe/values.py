"""Types of a recipe's values: paths, counts with their ranges, and what every section has in common."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

from ingot.artifact.serving import MOST_STEP_TOKENS
from ingot.settings import MAX_THREADS


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


def _whole(value: object) -> object:
    """Return a float without a fraction, such as 1e4, as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


GivenPath = Annotated[RecipePath, PlainSerializer(str, return_type=str), WithJsonSchema({"type": "string"})]
WholeNumber = Annotated[int, BeforeValidator(_whole)]
# Upper bounds are far above what is useful; they exist so that a slip is refused before it fills a disk or a memory.
MOST_TOKENS = 1 << 24
MOST_TEXT_TOKENS = 1_000_000_000
MOST_SECONDS = 86_400
MOST_SEED = (1 << 63) - 1
Rows = Annotated[int, Field(ge=1, le=MOST_STEP_TOKENS), BeforeValidator(_whole)]
ContextTokens = Annotated[int, Field(ge=1, le=MOST_TOKENS), BeforeValidator(_whole)]
Generations = Annotated[int, Field(ge=0, le=MOST_TOKENS), BeforeValidator(_whole)]
TextTokens = Annotated[int, Field(ge=0, le=MOST_TEXT_TOKENS), BeforeValidator(_whole)]
Concurrency = Annotated[int, Field(ge=1, le=4096), BeforeValidator(_whole)]
Threads = Annotated[int, Field(ge=1, le=MAX_THREADS), BeforeValidator(_whole)]


class Section(BaseModel):
    """A mapping of keys: frozen, without unknown keys, values of exactly the stated types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
