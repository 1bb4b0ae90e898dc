"""Training of small models on a processor: batches, learning rates, losses, optimizers, perplexity."""

# mypy: disable-error-code="no-untyped-call"
# torch and transformers leave some of their methods without annotations.

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
import torch
from examples.cpu_training import HeadLoss
from examples.muon import Muon
from numpy.typing import NDArray
from transformers import (
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

PEAK_LEARNING_RATE = 3e-3  # of AdamW
MUON_LEARNING_RATE = 3e-2
WEIGHT_DECAY = 0.1  # of matrices
LAST_SHARE = 0.02  # of the peak learning rate, at the end
EVALUATION_TOKENS = 61_440
WINDOW_TOKENS = 512
TEACHER_SHARE = 0.5  # share of the divergence in a mixture's loss
BALANCE = 0.01  # weight of the loss that keeps experts equally loaded
_REPORT_EVERY = 100
Losses = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Of a batch [sequences, tokens + 1]: the loss to report, and the one to lower."""


@dataclass(frozen=True)
class Method:
    """How an architecture is trained.

    sequences   of a batch
    tokens      of a sequence
    with_muon   Muon for the matrices of hidden layers, instead of AdamW for all
    flat_until  share of the training after which the learning rate falls
    peak        learning rate of AdamW
    warm_up     steps in which the learning rate rises to its peak
    """

    sequences: int = 8
    tokens: int = 256
    with_muon: bool = False
    flat_until: float = 0.6
    peak: float = PEAK_LEARNING_RATE
    warm_up: int = 100


@dataclass(frozen=True)
class Budget:
    """How long to train: a number of steps, or seconds of computing, which do not pass while other programs run."""

    steps: int | None
    seconds: float

    def share_done(self, step: int, elapsed: float) -> float:
        """0 at the start, 1 when the budget is used up."""
        return step / self.steps if self.steps is not None else elapsed / self.seconds


def share_of_peak(step: int, share_done: float, method: Method) -> float:
    """The learning rate, as a share of its peak: linear warm-up, then flat, then a straight line down to a fiftieth."""
    warm_up = min(1.0, (step + 1) / method.warm_up)
    fall = max(LAST_SHARE, (1 - share_done) / (1 - method.flat_until))
    return warm_up * min(1.0, fall)


def train(
    model: torch.nn.Module, losses: Losses, tokens: NDArray[np.int64], method: Method, budget: Budget, seed: int
) -> int:
    """Train until the budget is used up; return the number of steps."""
    optimizers = _optimizers(model, method)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peaks = [group["lr"] for group in groups]
    begin = time.thread_time()
    for step, batch in enumerate(batches(tokens, method, seed)):
        elapsed = time.thread_time() - begin
        share = budget.share_done(step, elapsed)
        if share >= 1:
            return step
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * share_of_peak(step, share, method)
        loss = _train_step(model, optimizers, losses(batch))
        if step % _REPORT_EVERY == 0:
            click.echo(f"step {step}, {share:.0%}, {elapsed:.0f} s, loss {loss:.3f}")
    raise AssertionError("batches never end")


def perplexity(model: PreTrainedModel, tokens: NDArray[np.int64]) -> float:
    """Per token, on the first EVALUATION_TOKENS in windows that each begin without context; float32."""
    windows = min(EVALUATION_TOKENS, len(tokens) - 1) // WINDOW_TOKENS
    losses = []
    model.eval()
    for window in range(windows):
        begin = window * WINDOW_TOKENS
        piece = torch.from_numpy(tokens[begin : begin + WINDOW_TOKENS + 1])  # [window + 1]
        with torch.no_grad():
            logits = model(piece[None, :-1]).logits[0]  # [window, vocab]
        losses.append(torch.nn.functional.cross_entropy(logits, piece[1:]).item())
    return float(np.exp(np.mean(losses)))


def _optimizers(model: torch.nn.Module, method: Method) -> list[torch.optim.Optimizer]:
    """AdamW with weight decay on matrices alone; Muon, where the method has it, for those of hidden layers."""
    matrices = {name: parameter for name, parameter in model.named_parameters() if parameter.ndim > 1}
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": vectors, "weight_decay": 0.0}]
    if not method.with_muon:
        groups.insert(0, {"params": list(matrices.values()), "weight_decay": WEIGHT_DECAY})
        return [_adamw(groups, method)]
    others = [parameter for name, parameter in matrices.items() if _is_embedding_or_router(name)]
    groups.append({"params": others, "weight_decay": 0.0})
    hidden = [parameter for name, parameter in matrices.items() if not _is_embedding_or_router(name)]
    return [_adamw(groups, method), Muon(hidden, lr=MUON_LEARNING_RATE, weight_decay=WEIGHT_DECAY)]


def _adamw(groups: list[dict[str, Any]], method: Method) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=method.peak, betas=(0.9, 0.95), fused=True)


def _is_embedding_or_router(name: str) -> bool:
    return "embed_tokens" in name or name.endswith(".gate.weight")


def batches(tokens: NDArray[np.int64], method: Method, seed: int) -> Iterator[torch.Tensor]:
    """Endless random pieces [batch, tokens + 1] of the corpus."""
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(tokens) - method.tokens, method.sequences)
        yield torch.from_numpy(np.stack([tokens[start : start + method.tokens + 1] for start in starts]))


def _train_step(
    model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], losses: tuple[torch.Tensor, torch.Tensor]
) -> float:
    loss, whole = losses
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    whole.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return float(loss.item())


def language_losses(
    model: PreTrainedModel, teacher: PreTrainedModel | None, batch: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross-entropy of a batch, in bf16 autocast, and the loss to lower: with that of unequally loaded experts.

    A mixture of experts may have a teacher; half of its loss is then the divergence from the teacher's distribution.
    """
    if not isinstance(model, Qwen3MoeForCausalLM | MixtralForCausalLM):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        return loss, loss
    config = model.config
    with torch.autocast("cpu", torch.bfloat16):
        found = model.model(batch[:, :-1], output_router_logits=True)
        num_experts = len(found.router_logits[0][0])
        unequal = load_balancing_loss_func(found.router_logits, num_experts, config.num_experts_per_tok)
        taught = None
        if teacher is not None:
            with torch.no_grad():
                taught = teacher.model(batch[:, :-1]).last_hidden_state.flatten(0, 1), teacher.lm_head.weight
    loss = HeadLoss.apply(
        found.last_hidden_state.flatten(0, 1), model.lm_head.weight, batch[:, 1:].flatten(), taught, TEACHER_SHARE
    )
    return loss, loss + BALANCE * unequal
