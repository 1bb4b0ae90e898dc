"""What the caller may set about speculation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ingot.artifact import Artifact
from ingot.artifact.serving import POOL_BYTES
from ingot.errors import UsageError, shown
from ingot.options import Doc, Flag, Range, Reader, check_options, documented

LOOKUP, SUFFIX = "lookup", "suffix"
MOST_DRAFT_TOKENS = 64


def _drafter(value: object) -> str | Path | Artifact:
    if not isinstance(value, str | Path | Artifact) or not str(value):
        raise ValueError
    return value


@documented
@dataclass(frozen=True)
class SpeculationOptions:
    """How the engine drafts tokens. Raises UsageError for a value that is out of range."""

    drafter: Annotated[
        str | Path | Artifact,
        Reader(_drafter, '"lookup", "suffix" or the folder of a draft artifact'),
        Flag("--speculate"),
        Doc(
            '"lookup": copy from the prompt and output; "suffix": from finished outputs of the same tenant, too; or a'
            " draft artifact, a smaller model with the same tokenizer: its folder, or itself if it is open"
        ),
    ]
    num_draft_tokens: Annotated[int, Range(ge=1, le=MOST_DRAFT_TOKENS), Doc("most drafts of a request in a step")] = 8
    adaptive: Annotated[
        bool,
        Doc(
            "choose the number of drafts by what they save, none where they do not pay; false: always as many as there"
            " are, for tests and measurements"
        ),
    ] = True
    history_tokens: Annotated[
        int,
        Range(ge=1024, le=1 << 24),
        Doc('tokens of finished outputs that "suffix" keeps, of all tenants together; 32 bytes each'),
    ] = 1 << 18
    draft_kv_bytes: Annotated[
        int | None,
        POOL_BYTES,
        Doc("size of the draft model's KV pool", none="by its context and the free memory"),
    ] = None

    def __post_init__(self) -> None:
        check_options(self, full=True)

    @property
    def has_model(self) -> bool:
        """True if drafts come from a model, False if they are copied."""
        return self.drafter not in (LOOKUP, SUFFIX)


def speculation_options(value: object) -> SpeculationOptions | None:
    """The options that a caller means: None for no speculation, a drafter alone, or all of them. Raises UsageError."""
    if value is None or isinstance(value, SpeculationOptions):
        return value
    if isinstance(value, str | Path):
        return SpeculationOptions(value)
    allowed = 'None, "lookup", "suffix", the folder of a draft artifact, or SpeculationOptions(...)'
    raise UsageError(f"speculation is {shown(value)}; it must be {allowed}")
