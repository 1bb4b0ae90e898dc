"""Loads what the options of an engine say about speculation."""

from ingot.artifact import Artifact
from ingot.errors import UsageError
from ingot.runtime.options import EngineOptions
from ingot.runtime.speculation.length_control import LengthControl
from ingot.runtime.speculation.options import speculation_options
from ingot.runtime.speculation.prompt_lookup import PromptLookup
from ingot.runtime.speculation.speculator import Speculator


def load_speculator(options: EngineOptions, target: Artifact) -> Speculator | None:
    """The speculator of an engine that loads `target`; None when the options set none."""
    chosen = speculation_options(options.speculation)
    if chosen is None:
        return None
    if not chosen.is_lookup:
        raise UsageError(f'speculation is {str(chosen.drafter)!r}; this version supports "lookup"')
    return Speculator(
        PromptLookup(),
        vocab_size=target.manifest.model.vocab_size,
        num_draft_tokens=chosen.num_draft_tokens,
        control=LengthControl(adapts=chosen.adaptive),
    )
