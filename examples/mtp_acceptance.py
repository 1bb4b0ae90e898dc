"""Measure how often a checkpoint's MTP layer drafts the tokens that the model itself decodes greedily.

    python -m examples.mtp_acceptance examples/models/stdlib-mimo-6m \
        --text examples/models/stdlib-llama-6m/heldout.txt

A draft of depth d is counted where the d - 1 drafts before it were right. In the model's continuations, which is what a
user decodes, each draft is of the text's next tokens; in the text as it is, the next tokens are the model's choice only
where the two agree, so drafts are counted up to the first difference.
"""

# mypy: disable-error-code="no-untyped-call"
# torch and transformers leave some of their methods without annotations.

from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
from examples.mimo_checkpoint import load_checkpoint
from examples.mtp_layer import MtpLayer, run_base, unroll
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import DynamicCache, PreTrainedModel

NUM_WINDOWS = 32
PROMPT_TOKENS = 128
CONTINUED_TOKENS = 128
DEPTHS = 3
_AT_ONCE = 16  # sequences


@dataclass(frozen=True)
class Acceptance:
    """Drafts that the model would have chosen itself.

    counted  drafts of each depth whose earlier drafts were right
    right    those of them that were right too
    """

    counted: tuple[int, ...]
    right: tuple[int, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of right drafts among the counted ones, by depth."""
        return tuple(right / max(1, counted) for right, counted in zip(self.right, self.counted, strict=True))

    @property
    def tokens_per_step(self) -> float:
        """Tokens that one step of the model yields with a draft of all depths: its own and the right ones."""
        return float(1 + np.cumprod(self.shares).sum())

    def __str__(self) -> str:
        depths = ", ".join(f"{share:.1%}" for share in self.shares)
        return f"{depths}; {self.tokens_per_step:.2f} tokens a step with {len(self.right)} drafts"


def continue_greedily(base: PreTrainedModel, prompts: torch.Tensor, count: int) -> torch.Tensor:
    """The prompts [sequences, tokens], each followed by the `count` tokens that the model finds most probable."""
    cache, pieces = DynamicCache(), [prompts]
    with torch.no_grad():
        for _ in range(count):
            logits = base(pieces[-1], past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            pieces.append(logits.argmax(-1))  # [sequences, 1]
    return torch.cat(pieces, dim=1)


def measure(base: PreTrainedModel, layer: MtpLayer, rows: torch.Tensor, begin: int, depths: int = DEPTHS) -> Acceptance:
    """Acceptance of drafts in rows [sequences, tokens] that begin at token `begin` or after it."""
    parts = [_chains(base, layer, some, begin, depths) for some in rows.split(_AT_ONCE)]
    counted, right = (torch.stack(each).sum(0).tolist() for each in zip(*parts, strict=True))
    return Acceptance(tuple(counted), tuple(right))


def _chains(
    base: PreTrainedModel, layer: MtpLayer, rows: torch.Tensor, begin: int, depths: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of counted and of right drafts of each depth."""
    with torch.no_grad():
        states = run_base(base, rows)
        greedy = base.lm_head(states.normed).argmax(-1)[:, 1:]  # [sequences, slots]
        drafts = [base.lm_head(hidden).argmax(-1) for hidden in unroll(layer, states, depths)]
    is_text = greedy[:, :-1] == rows[:, 2:]  # [sequences, slots]
    starts = torch.arange(begin - 1, rows.shape[1] - depths)  # slots of depth 1; depth d is in slot start + d - 1
    is_open = torch.ones(len(rows), len(starts), dtype=torch.bool)
    counted, right = [], []
    for depth, draft in enumerate(drafts):
        slots = starts + depth
        is_right = is_open & (draft[:, slots] == greedy[:, slots])
        counted.append(is_open.sum())
        right.append(is_right.sum())
        if depth + 1 < depths:
            is_open = is_right & is_text[:, slots]
    return torch.stack(counted), torch.stack(right)


def windows(tokens: NDArray[np.int64], count: int, width: int) -> torch.Tensor:
    """Pieces [count, width] of the text, evenly spread."""
    starts = np.linspace(0, len(tokens) - width, count, dtype=np.int64)
    return torch.from_numpy(np.stack([tokens[start : start + width] for start in starts]))


def measure_both(base: PreTrainedModel, layer: MtpLayer, tokens: NDArray[np.int64]) -> tuple[Acceptance, Acceptance]:
    """Acceptance in the model's continuations of pieces of the text, and in the text itself."""
    text = windows(tokens, NUM_WINDOWS, PROMPT_TOKENS + CONTINUED_TOKENS)
    continued = continue_greedily(base, text[:, :PROMPT_TOKENS], CONTINUED_TOKENS)
    return measure(base, layer, continued, PROMPT_TOKENS), measure(base, layer, text, PROMPT_TOKENS)


@click.command(help=__doc__)
@click.argument("checkpoint", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--text", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=True)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
def main(checkpoint: Path, text: Path, threads: int) -> None:
    """Print both acceptances."""
    torch.set_num_threads(threads)
    base, layer = load_checkpoint(checkpoint)
    bpe = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokens = np.array(bpe.encode(text.read_text("utf-8")).ids, dtype=np.int64)
    continued, as_is = measure_both(base, layer, tokens)
    click.echo(f"depths 1 to {DEPTHS} in greedy continuations: {continued}")
    click.echo(f"depths 1 to {DEPTHS} in the text as it is: {as_is}")


if __name__ == "__main__":
    main()
