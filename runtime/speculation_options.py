"""What the caller may set about speculation.

drafters = drafter { "+" drafter }
drafter  = a name of DRAFTERS, "auto" for all that need nothing, or the folder of a draft artifact
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Self

from ingot.artifact import Artifact
from ingot.artifact.programs.draft_head import DRAFT_HEAD_FILE
from ingot.artifact.serving import POOL_BYTES
from ingot.errors import UsageError, near_or_all, shown
from ingot.options import Doc, Flag, Range, Reader, check_options, documented

LOOKUP, SUFFIX, MTP, AUTO = "lookup", "suffix", "mtp", "auto"
DRAFT = "draft"  # kind of the drafts of a draft artifact
DRAFTERS: Mapping[str, str] = {
    "lookup": "copy from the prompt and output",
    "suffix": "copy from there and from outputs of the same tenant",
    "mtp": "predict by the MTP layer that the artifact has",
    "auto": "all that need no other artifact",
}
MOST_DRAFT_TOKENS = 64

DraftSource = str | Path | Artifact
"""A name of DRAFTERS, or a draft artifact: its folder, or itself if it is open."""

_ALLOWED = ", ".join(f'"{name}"' for name in DRAFTERS)


def _drafter(value: object) -> DraftSource | tuple[DraftSource, ...]:
    """Check drafters. ValueError for a wrong type, UsageError for an unknown name and several draft artifacts."""
    found = tuple(_sources(value))
    drafts = [each for each in found if not _is_name(each)]
    if not found or not all(isinstance(each, Artifact) or str(each) for each in found):
        raise ValueError
    if len(drafts) > 1:
        raise UsageError(
            f"drafter names {len(drafts)} draft artifacts, {shown(str(drafts[0]))} and {shown(str(drafts[1]))}; there"
            " may be one"
        )
    return tuple(value) if isinstance(value, list | tuple) else value  # type: ignore[return-value]  # it was checked


def _path(value: object) -> str:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ValueError
    return os.fsdecode(value)


def _sources(value: object) -> Iterator[DraftSource]:
    """The drafters that a value names."""
    if isinstance(value, Path | Artifact):
        yield value
    elif isinstance(value, str):
        yield from _split(value)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _sources(each)
    else:
        raise ValueError


def _is_name(source: DraftSource) -> bool:
    return isinstance(source, str) and source in DRAFTERS


def _split(text: str) -> Iterator[str]:
    """The drafters of a text. What is not a name is the path of a folder, which may contain a plus sign."""
    if text in DRAFTERS or not text or os.path.isdir(text):
        yield text
        return
    parts = text.split("+")
    yield from (part for part in parts if part in DRAFTERS)
    places = [index for index, part in enumerate(parts) if part not in DRAFTERS]
    if places:
        yield _folder("+".join(parts[places[0] : places[-1] + 1]))


def _folder(text: str) -> str:
    """Check what should be a folder, unless it is written as a path: then opening it says what is wrong."""
    if text and os.sep not in text and not os.path.exists(text):
        near = near_or_all(text, DRAFTERS, "drafters")
        raise UsageError(f"drafter is {shown(text)}, which is neither a drafter nor a folder{near}")
    return text


@documented
@dataclass(frozen=True)
class SpeculationOptions:
    """How the engine drafts tokens. Raises UsageError for a value that is out of range."""

    drafter: Annotated[
        DraftSource | Sequence[DraftSource],
        Reader(_drafter, f'{_ALLOWED}, the folder of a draft artifact, or several of them joined by "+"'),
        Flag("--speculate"),
        Doc(
            "; ".join(f'"{name}": {text}' for name, text in DRAFTERS.items())
            + "; a draft artifact, a smaller model with the same tokenizer: its folder, or itself if it is open. Of"
            ' several, as "suffix+artifacts/small", each step takes those that are expected to pay most'
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
        Doc('tokens of outputs that "suffix" keeps, of all tenants together; 32 bytes each'),
    ] = 1 << 18
    history_path: Annotated[
        str | os.PathLike[str] | None,
        Reader(_path, "the path of a folder", is_text=True),
        Doc(
            'folder in which "suffix" keeps its tokens when the engine is closed, for the next one of the same'
            " artifact; 4 bytes each, readable by its owner alone",
            none="they end with the engine",
        ),
    ] = None
    draft_kv_bytes: Annotated[
        int | None,
        POOL_BYTES,
        Doc("size of the KV pool of the draft model or MTP layer", none="by its context and the free memory"),
    ] = None

    def __post_init__(self) -> None:
        check_options(self, full=True)
        if self.history_path is not None and not self.names & {AUTO, SUFFIX}:
            raise UsageError(
                f"history_path is {shown(os.fspath(self.history_path))}, and there is no history without {SUFFIX} among"
                " the drafters; add it, or leave the path out"
            )

    @property
    def names(self) -> frozenset[str]:
        """The names of DRAFTERS that are given. AUTO is resolved where the artifact is known (`loading`)."""
        return frozenset(str(each) for each in _sources(self.drafter) if _is_name(each))

    def uses_head(self, target: Artifact) -> bool:
        """Return whether drafts come from the artifact's MTP layer, so that its executor keeps hidden states."""
        return MTP in self.names or (AUTO in self.names and target.has(DRAFT_HEAD_FILE))

    @property
    def draft(self) -> DraftSource | None:
        """The draft artifact, or its folder; None without any."""
        return next((each for each in _sources(self.drafter) if not _is_name(each)), None)

    def with_draft(self, draft: Artifact) -> Self:
        """The same with an open artifact in place of its folder."""
        return replace(self, drafter=(*sorted(self.names), draft))


def speculation_options(value: object) -> SpeculationOptions | None:
    """The options that a caller means: None for no speculation, drafters alone, or all of them. Raises UsageError."""
    if value is None or isinstance(value, SpeculationOptions):
        return value
    if isinstance(value, str | Path):
        return SpeculationOptions(value)
    allowed = (
        f"None, {_ALLOWED}, the folder of a draft artifact, several of them joined by +, or SpeculationOptions(...)"
    )
    raise UsageError(f"speculation is {shown(value)}; it must be {allowed}")
