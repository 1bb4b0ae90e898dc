"""What the caller may set about speculation."""

from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

from ingot.artifact import Artifact
from ingot.errors import UsageError, shown

LOOKUP = "lookup"
MOST_DRAFT_TOKENS = 64


@dataclass(frozen=True)
class SpeculationOptions:
    """How the engine drafts tokens. Raises UsageError for a value that is out of range.

    drafter            "lookup": copy from the prompt and output; or a draft artifact, a smaller model with the same
                       tokenizer: its folder, or itself if it is open
    num_draft_tokens   most drafts of a request in a step
    adaptive           choose the number of drafts by what they save, none where they do not pay; False: always as many
                       as there are, for tests and measurements
    draft_kv_bytes     size of the draft model's KV pool; None: by its context and the free memory
    """

    drafter: str | Path | Artifact
    num_draft_tokens: int = 8
    adaptive: bool = True
    draft_kv_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.drafter, str | Path | Artifact) or not str(self.drafter):
            raise UsageError(f'drafter is {shown(self.drafter)}; it must be "lookup" or the folder of a draft artifact')
        count = self.num_draft_tokens
        if isinstance(count, bool) or not isinstance(count, Integral) or not 1 <= count <= MOST_DRAFT_TOKENS:
            allowed = f"a whole number from 1 to {MOST_DRAFT_TOKENS}"
            raise UsageError(f"num_draft_tokens is {shown(count)}; it must be {allowed}: leave it out for 8")
        if not isinstance(self.adaptive, bool):
            raise UsageError(f"adaptive is {shown(self.adaptive)}; it must be True or False")
        size = self.draft_kv_bytes
        if size is not None and (isinstance(size, bool) or not isinstance(size, Integral) or size < 1):
            raise UsageError(f"draft_kv_bytes is {shown(size)}; it must be a number of bytes, or None for the default")

    @property
    def is_lookup(self) -> bool:
        """Whether drafts are copied, and need no model."""
        return self.drafter == LOOKUP


def speculation_options(value: object) -> SpeculationOptions | None:
    """The options that a caller means: None for no speculation, a drafter alone, or all of them. Raises UsageError."""
    if value is None or isinstance(value, SpeculationOptions):
        return value
    if isinstance(value, str | Path):
        return SpeculationOptions(value)
    allowed = 'None, "lookup", the folder of a draft artifact, or SpeculationOptions(...)'
    raise UsageError(f"speculation is {shown(value)}; it must be {allowed}")
