"""Loads what the options of an engine say about speculation."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ingot.artifact import Artifact, KVGeometry, open_artifact
from ingot.errors import EngineError, UsageError
from ingot.runtime.executors import DraftingExecutor, Executor, load_executor
from ingot.runtime.options import EngineOptions, free_memory_bytes
from ingot.runtime.speculation.draft_head import HeadDrafter
from ingot.runtime.speculation.draft_model import DraftModel
from ingot.runtime.speculation.drafter import Drafter
from ingot.runtime.speculation.history_file import HistoryFile
from ingot.runtime.speculation.length_control import LengthControl
from ingot.runtime.speculation.output_history import OutputHistory
from ingot.runtime.speculation.prompt_lookup import PromptLookup
from ingot.runtime.speculation.speculator import Speculator
from ingot.runtime.speculation_options import (
    AUTO,
    LOOKUP,
    SUFFIX,
    DraftSource,
    SpeculationOptions,
    speculation_options,
)
from ingot.runtime.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_POOL_CONTEXTS = 8  # of the draft model's KV pool, by default
_POOL_SHARE = 1 / 16  # of the free memory, at most


def load_speculator(options: EngineOptions, target: Artifact, executor: Executor) -> Speculator | None:
    """The speculator of an engine that loaded `target` in `executor`; None when the options set none.

    Raises ArtifactError and EngineError for a draft artifact that cannot be loaded, and UsageError for one that cannot
    draft for the target.
    """
    chosen = speculation_options(options.speculation)
    if chosen is None:
        return None
    return Speculator(
        *_drafters(chosen, options, target, executor),
        vocab_size=target.manifest.model.vocab_size,
        num_draft_tokens=chosen.num_draft_tokens,
        control=LengthControl(adapts=chosen.adaptive, replays=target.manifest.kv.state_bytes > 0),
    )


def _drafters(
    chosen: SpeculationOptions, options: EngineOptions, target: Artifact, executor: Executor
) -> Iterator[Drafter]:
    """The drafters that the options name. Suffix decoding includes prompt lookup."""
    if chosen.names & {AUTO, SUFFIX}:
        yield PromptLookup(OutputHistory(chosen.history_tokens), _history_file(chosen, target))
    elif LOOKUP in chosen.names:
        yield PromptLookup()
    if chosen.uses_head(target):
        assert isinstance(executor, DraftingExecutor)
        num_blocks = _pool_blocks(chosen, options, executor.head_geometry, target.manifest.model.context_tokens)
        yield HeadDrafter(executor, num_blocks)
    if chosen.draft is not None:
        yield _load_draft(chosen.draft, chosen, options, target)


def _history_file(chosen: SpeculationOptions, target: Artifact) -> HistoryFile | None:
    if chosen.history_path is None:
        return None
    manifest = target.manifest
    return HistoryFile(chosen.history_path, identity=manifest.identity, vocab_size=manifest.model.vocab_size)


def _load_draft(
    source: DraftSource, chosen: SpeculationOptions, options: EngineOptions, target: Artifact
) -> DraftModel:
    draft = source if isinstance(source, Artifact) else open_artifact(Path(source))
    require_draft(draft, target)
    own = replace(
        options,
        speculation=None,
        state_slots=None,
        max_adapters=0,
        kv_blocks=_pool_blocks(chosen, options, draft.manifest.kv, draft.manifest.model.context_tokens),
        kv_bytes=None,
        kv_offload="off",
        stages=None,
        tensor_parallel=None,
        expert_parallel=False,
    )
    try:
        executor = load_executor(draft, own)
    except EngineError as error:
        raise EngineError(f"the draft, whose KV pool has the size draft_kv_bytes: {error}") from error
    _log.info("drafts come from %s, with %d KV blocks", draft.path, executor.num_blocks)
    return DraftModel(executor, target_vocab_size=target.manifest.model.vocab_size)


def _pool_blocks(chosen: SpeculationOptions, options: EngineOptions, kv: KVGeometry, context: int) -> int:
    if chosen.draft_kv_bytes is not None:
        if chosen.draft_kv_bytes < kv.block_bytes:
            raise UsageError(
                f"draft_kv_bytes is {chosen.draft_kv_bytes}; one KV block of the draft takes {kv.block_bytes} bytes"
            )
        return chosen.draft_kv_bytes // kv.block_bytes
    contexts = min(_POOL_CONTEXTS, options.max_sequences or _POOL_CONTEXTS)
    most = int(free_memory_bytes() * _POOL_SHARE) // kv.block_bytes
    return max(1, min(contexts * -(-context // kv.block_tokens), most))


def require_draft(draft: Artifact, target: Artifact) -> None:
    """Raise UsageError unless an artifact can draft for the target."""
    _require_same_tokens(draft, target)
    if draft.manifest.kv.state_bytes:
        raise UsageError(
            f"{draft.path} cannot draft: its model keeps side state for each sequence, which drafts would have to roll"
            " back; choose a draft without recurrent layers, or speculation: lookup"
        )


def _require_same_tokens(draft: Artifact, target: Artifact) -> None:
    """Raise UsageError unless token ids mean the same to both: equal vocabularies; without tokenizers, equal sizes."""
    one, other = _vocabulary(draft), _vocabulary(target)
    if one is None or other is None:
        sizes = draft.manifest.model.vocab_size, target.manifest.model.vocab_size
        if one is not other or sizes[0] != sizes[1]:
            raise _refusal(draft, target, f"vocabularies of {sizes[0]} and {sizes[1]} tokens, and not both a tokenizer")
        return
    if one != other:
        token, first, second = next(
            (token, one.get(token), other.get(token))
            for token in sorted(one.keys() | other.keys())
            if one.get(token) != other.get(token)
        )
        raise _refusal(draft, target, f"token {token!r} has the id {first} in the one and {second} in the other")


def _vocabulary(artifact: Artifact) -> dict[str, int] | None:
    tokenizer = Tokenizer.of_artifact(artifact)
    return tokenizer.vocabulary() if tokenizer else None


def _refusal(draft: Artifact, target: Artifact, difference: str) -> UsageError:
    return UsageError(
        f"{draft.path} cannot draft for {target.path}: their tokenizers differ ({difference}); build the draft from a"
        " model with the same tokenizer"
    )
