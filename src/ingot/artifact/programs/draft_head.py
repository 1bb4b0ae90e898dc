"""A draft head of the native CPU engine: a small program that predicts from the model's hidden states.

    program/draft_head.json       DraftHead
    program/weights.safetensors   its weights, next to the model's; table and head of the vocabulary are the model's own

The head computes a token from the hidden state before it: row i reads token i + 1 of a sequence and hidden state i, and
its logits predict token i + 2. Its own hidden state, with its own draft, takes it one token further.
"""

from pathlib import Path

from pydantic import Field

from ingot.artifact.json_text import read_program
from ingot.artifact.programs.cpu_program import MAX_PROGRAM_BYTES, CpuProgram
from ingot.artifact.programs.operation_row import Frozen

DRAFT_HEAD_FILE = "program/draft_head.json"
HIDDEN_STATES = "hidden_states"
"""Buffer of a head that its caller fills before a step: rows of tokens."""
HIDDEN = "hidden"
"""Buffer that holds hidden states after a step: of the model rows of tokens, of the head rows of logits."""


class DraftHead(Frozen):
    """program/draft_head.json.

    hidden_size   columns of hidden states
    model         the model's program once more, on the same weights, with hidden states in HIDDEN
    head          the head's, which reads HIDDEN_STATES
    """

    hidden_size: int = Field(ge=1)
    model: CpuProgram
    head: CpuProgram


def read_draft_head(file: Path) -> DraftHead:
    """Read program/draft_head.json; ArtifactError with the file and its problem."""
    return read_program(file, DraftHead, MAX_PROGRAM_BYTES)
