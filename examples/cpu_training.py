"""Operations of a training step that transformers and torch compute slowly on a CPU, written for small models.

Large temporary tensors are what costs there: logits [tokens, vocabulary] and attention weights of a whole batch are
mapped into memory anew in every step. Here they are made a piece at a time.
"""

# mypy: disable-error-code="no-untyped-call"
# torch leaves some of its methods without annotations.

from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

SORTED_EXPERTS = "sorted"  # experts_implementation of a configuration
ATTENTION_BY_SEQUENCE = "by_sequence"  # attn_implementation
_LOSS_TOKENS = 256  # whose logits are made at once


class HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of a head's logits, which are never stored whole; gradients are computed with the loss.

    With a teacher, the gradients are of a mixture: `teacher_share` of the Kullback-Leibler divergence from the
    teacher's distribution (Hinton et al. 2015, arXiv 1503.02531, with a temperature of 1), the rest of that loss.
    """

    @staticmethod
    def forward(
        context: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        targets: torch.Tensor,
        teacher: tuple[torch.Tensor, torch.Tensor] | None = None,
        teacher_share: float = 0.0,
    ) -> torch.Tensor:
        """`hidden` [tokens, width], `head` [vocabulary, width], `targets` [tokens]; `teacher`: its hidden and head."""
        weights = head.bfloat16()
        by_hidden, by_head = [], torch.zeros_like(head) if context.needs_input_grad[1] else None
        loss = torch.zeros(())
        share = 1.0 if teacher is None else 1 - teacher_share  # of the targets
        for piece in torch.arange(len(targets)).split(_LOSS_TOKENS):
            some, wanted = hidden[piece].bfloat16(), targets[piece, None]
            log_shares = (some @ weights.T).float().log_softmax(-1)  # [some tokens, vocabulary]
            loss -= log_shares.gather(1, wanted).sum()
            errors = log_shares.exp_().scatter_add_(1, wanted, torch.full(wanted.shape, -share))
            if teacher is not None:
                taught = teacher[0][piece].bfloat16() @ teacher[1].bfloat16().T
                errors -= taught.float().softmax(-1).mul_(teacher_share)
            errors = (errors / len(targets)).bfloat16()
            by_hidden.append(errors @ weights)
            if by_head is not None:
                by_head += errors.T @ some
        context.save_for_backward(torch.cat(by_hidden), by_head)
        return loss / len(targets)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The stored gradients, times that of the loss, which a frozen head lacks."""
        by_hidden, by_head = context.saved_tensors
        return by_hidden * gradients[0], None if by_head is None else by_head * gradients[0], None, None, None


def _sorted_experts(layer: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Experts of gated feed-forward: tokens are sorted by expert once, so that each expert has one slice of them."""
    order = chosen.flatten().argsort(stable=True)  # [tokens * chosen experts]
    counts = torch.bincount(chosen.flatten(), minlength=layer.num_experts).tolist()
    rows = order // chosen.shape[1]
    # Converted whole: each slice that autocast converts would have a gradient as large as the whole tensor.
    experts = zip(layer.gate_up_proj.bfloat16(), layer.down_proj.bfloat16(), hidden[rows].split(counts), strict=True)
    found = []
    for gate_up, down, tokens in experts:
        gate, up = functional.linear(tokens, gate_up).chunk(2, dim=-1)
        found.append(functional.linear(layer.act_fn(gate) * up, down))
    weighted = torch.cat(found) * weights.flatten()[order, None]
    return torch.zeros_like(hidden).index_add_(0, rows, weighted.to(hidden.dtype))


def _attention_by_sequence(
    layer: Any,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention [sequences, heads, tokens, width] of sequences without padding, one after the other."""
    tokens, group = queries.shape[2], queries.shape[1] // keys.shape[1]
    future = torch.full((tokens, tokens), -torch.inf, dtype=torch.bfloat16).triu(1)
    queries, keys, values = queries.bfloat16() * scaling, keys.bfloat16(), values.bfloat16()
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    found = [
        (query @ key.mT + future).float().softmax(-1).bfloat16() @ value
        for query, key, value in zip(queries, keys, values, strict=True)
    ]
    return torch.stack(found).transpose(1, 2).contiguous(), None


def register() -> None:
    """Make the two implementations known to transformers."""
    ALL_EXPERTS_FUNCTIONS.register(SORTED_EXPERTS, _sorted_experts)
    AttentionInterface.register(ATTENTION_BY_SEQUENCE, _attention_by_sequence)
