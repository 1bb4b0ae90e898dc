r"""Train a model like those of examples/models: a small one that writes Python, by default a Llama.

    pip install --group oracle            # torch and transformers
    python -m examples.train_demo_model --minutes 80 --out my-model

and a smaller one with the same tokenizer, which drafts tokens for it (speculation):

    python -m examples.train_demo_model --steps 2200 --threads 2 --hidden 128 --layers 2 \
        --tokenizer examples/models/stdlib-llama-6m --out my-draft

a mixture of experts, and a hybrid of gated delta rules and attention, of about the same size:

    python -m examples.train_demo_model --architecture qwen3_moe --layers 3 \
        --tokenizer examples/models/stdlib-llama-6m --out my-mixture
    python -m examples.train_demo_model --architecture qwen3_next --layers 4 \
        --tokenizer examples/models/stdlib-llama-6m --out my-hybrid

and a mixture of experts that the feed-forwards of a trained Llama are split into; the Llama then teaches it:

    python -m examples.train_demo_model --split examples/models/stdlib-llama-6m --steps 1500 --out my-mixture

Writes a Hugging Face checkpoint (fp16), its tokenizer, the held-out text, and a model card with the measurements. The
same seed, steps, threads, Python and torch give the same model; with --minutes the machine's speed decides the steps.
Minutes are the program's own on a processor: the schedule of learning rates does not depend on what else runs.
"""

# mypy: disable-error-code="no-untyped-call"
# torch and transformers leave some of their methods without annotations.

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from examples.cpu_training import ATTENTION_BY_SEQUENCE, SORTED_EXPERTS, HeadLoss, register
from examples.demo_model_card import TrainingFacts, model_card
from examples.muon import Muon
from examples.split_experts import split_experts
from examples.stdlib_corpus import (
    END_OF_TEXT,
    END_OF_TEXT_ID,
    VOCAB_SIZE,
    Corpus,
    encode_modules,
    read_corpus,
    train_tokenizer,
)
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

PEAK_LEARNING_RATE = 3e-3  # of AdamW
MUON_LEARNING_RATE = 3e-2
WEIGHT_DECAY = 0.1  # of matrices
WARM_UP_STEPS = 100
LAST_SHARE = 0.02  # of the peak learning rate, at the end
EVALUATION_TOKENS = 61_440
WINDOW_TOKENS = 512
HEAD_WIDTH = 32
BALANCE = 0.01  # weight of the loss that keeps experts equally loaded
MUON_TEXT = "Muon for the matrices of hidden layers, learning rate 3e-2; others "
NUM_PARTS = 4  # experts that a feed-forward is split into
CHOSEN_PARTS = 2
_REPORT_EVERY = 100


@dataclass(frozen=True)
class Method:
    """How an architecture is trained.

    sequences   of a batch
    tokens      of a sequence
    with_muon   Muon for the matrices of hidden layers, instead of AdamW for all
    flat_until  share of the training after which the learning rate falls
    peak        learning rate of AdamW
    """

    sequences: int = 8
    tokens: int = 256
    with_muon: bool = False
    flat_until: float = 0.6
    peak: float = PEAK_LEARNING_RATE


METHODS = {
    "llama": Method(),
    "qwen3_moe": Method(sequences=4, tokens=512, with_muon=True, flat_until=0.3),
    "qwen3_next": Method(),
    "mixtral": Method(flat_until=0.2, peak=1e-3),
}
ARCHITECTURES = ("llama", "qwen3_moe", "qwen3_next")  # that train from random weights


@dataclass(frozen=True)
class Budget:
    """How long to train: a number of steps, or seconds of computing, which do not pass while other programs run."""

    steps: int | None
    seconds: float

    def share_done(self, step: int, elapsed: float) -> float:
        """0 at the start, 1 when the budget is used up."""
        return step / self.steps if self.steps is not None else elapsed / self.seconds


def make_model(architecture: str = "llama", hidden: int = 256, layers: int = 6) -> PreTrainedModel:
    """A model with random weights, embedding and head tied; by default of the demo model's 5.8 million parameters.

    "qwen3_moe" chooses 2 of 8 experts in every layer; of "qwen3_next" every fourth layer attends, and the others have
    gated delta rules.
    """
    heads = hidden // HEAD_WIDTH
    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
    }
    if architecture == "llama":
        return LlamaForCausalLM(LlamaConfig(**common, intermediate_size=3 * hidden, rms_norm_eps=1e-5))
    if architecture == "qwen3_moe":
        mixture: dict[str, Any] = {
            "intermediate_size": hidden,
            "head_dim": HEAD_WIDTH,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 3 * hidden // 4,
            "norm_topk_prob": True,
            "experts_implementation": SORTED_EXPERTS,
            "attn_implementation": ATTENTION_BY_SEQUENCE,
        }
        register()
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **mixture))
    hybrid = Qwen3NextConfig(
        **common,
        intermediate_size=3 * hidden,
        head_dim=HEAD_WIDTH,
        num_experts=0,
        linear_num_key_heads=heads // 2,
        linear_num_value_heads=heads,
        linear_key_head_dim=HEAD_WIDTH,
        linear_value_head_dim=HEAD_WIDTH,
    )
    return Qwen3NextForCausalLM(hybrid)


def _split(dense: LlamaForCausalLM, tokens: NDArray[np.int64], seed: int) -> PreTrainedModel:
    """A mixture of the experts that the Llama's feed-forwards are split into."""
    register()
    batch = next(_batches(tokens, Method(sequences=32, tokens=512), seed + 1))
    how = {"experts_implementation": SORTED_EXPERTS, "attn_implementation": ATTENTION_BY_SEQUENCE}
    return split_experts(dense, batch, NUM_PARTS, CHOSEN_PARTS, **how)


def share_of_peak(step: int, share_done: float, flat_until: float) -> float:
    """The learning rate, as a share of its peak: linear warm-up, then flat, then a straight line down to a fiftieth."""
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    fall = max(LAST_SHARE, (1 - share_done) / (1 - flat_until))
    return warm_up * min(1.0, fall)


def train(
    model: PreTrainedModel,
    tokens: NDArray[np.int64],
    method: Method,
    budget: Budget,
    seed: int,
    teacher: PreTrainedModel | None = None,
) -> int:
    """Train in bf16 autocast until the budget is used up; return the number of steps. `teacher`: of a mixture."""
    optimizers = _optimizers(model, method)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peaks = [group["lr"] for group in groups]
    begin = time.thread_time()
    for step, batch in enumerate(_batches(tokens, method, seed)):
        elapsed = time.thread_time() - begin
        share = budget.share_done(step, elapsed)
        if share >= 1:
            return step
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * share_of_peak(step, share, method.flat_until)
        loss = _train_step(model, optimizers, batch, teacher)
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


def write_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, corpus: Corpus, folder: Path) -> None:
    """Write the checkpoint in fp16, the tokenizer and the held-out text."""
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "heldout.txt").write_text(corpus.heldout_text, "utf-8")
    names = [module.name for module in corpus.heldout]
    (folder / "heldout-modules.json").write_text(json.dumps(names, indent=0), "utf-8")


def _optimizers(model: PreTrainedModel, method: Method) -> list[torch.optim.Optimizer]:
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


def _batches(tokens: NDArray[np.int64], method: Method, seed: int) -> Iterator[torch.Tensor]:
    """Endless random pieces [batch, tokens + 1] of the corpus."""
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(tokens) - method.tokens, method.sequences)
        yield torch.from_numpy(np.stack([tokens[start : start + method.tokens + 1] for start in starts]))


def _train_step(
    model: PreTrainedModel,
    optimizers: list[torch.optim.Optimizer],
    batch: torch.Tensor,
    teacher: PreTrainedModel | None,
) -> float:
    loss, whole = _losses(model, batch, teacher)
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    whole.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return float(loss.item())


def _losses(
    model: PreTrainedModel, batch: torch.Tensor, teacher: PreTrainedModel | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross-entropy of a batch, and the loss to lower: with that of unequally loaded experts, if there are any."""
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
    loss = HeadLoss.apply(found.last_hidden_state.flatten(0, 1), model.lm_head.weight, batch[:, 1:].flatten(), taught)
    return loss, loss + BALANCE * unequal


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write; must not exist.")
@click.option("--minutes", type=click.FloatRange(min=0.1), default=80.0, show_default=True, help="Processor time.")
@click.option("--steps", type=click.IntRange(min=1), help="Train exactly so many steps instead.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--architecture", type=click.Choice(ARCHITECTURES), default="llama", show_default=True)
@click.option("--hidden", type=click.IntRange(min=64), default=256, show_default=True, help="Width, a multiple of 64.")
@click.option("--layers", type=click.IntRange(min=1), default=6, show_default=True)
@click.option(
    "--tokenizer",
    "like",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of a model whose tokenizer.json is used, instead of training one: a draft needs its target's.",
)
@click.option(
    "--split",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of a Llama whose feed-forwards become experts, instead of random weights: a mixtral.",
)
def main(
    out: Path,
    minutes: float,
    steps: int | None,
    threads: int,
    seed: int,
    architecture: str,
    hidden: int,
    layers: int,
    like: Path | None,
    split: Path | None,
) -> None:
    """Corpus, tokenizer, training, evaluation, files: in this order."""
    if out.exists():
        raise click.UsageError(f"--out {out} exists; name a new folder")
    if hidden % (2 * HEAD_WIDTH):
        raise click.UsageError(f"--hidden {hidden} is not a multiple of {2 * HEAD_WIDTH}, the width of two heads")
    if split:
        if not isinstance(AutoConfig.from_pretrained(split), LlamaConfig):
            raise click.UsageError(f"--split {split} is not a Llama; name the folder of one")
        architecture, like = "mixtral", split
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    corpus = read_corpus()
    bpe = Tokenizer.from_file(str(like / "tokenizer.json")) if like else train_tokenizer(corpus)
    tokens = encode_modules(bpe, corpus.train, seed)
    click.echo(f"{len(corpus.train)} modules, {len(tokens) / 1e6:.1f} million tokens; {len(corpus.heldout)} held out")
    method = METHODS[architecture]
    begin = time.thread_time()
    teacher = LlamaForCausalLM.from_pretrained(split, dtype=torch.float32) if split else None
    model = _split(teacher, tokens, seed) if teacher else make_model(architecture, hidden, layers)
    done = train(model, tokens, method, Budget(steps, 60 * minutes), seed, teacher)
    seconds = time.thread_time() - begin
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)
    write_model(model, tokenizer, corpus, out)
    heldout = np.array(bpe.encode(corpus.heldout_text).ids, dtype=np.int64)
    facts = TrainingFacts(
        architecture=architecture,
        parameters=model.num_parameters(),
        hidden=model.config.hidden_size,
        layers=model.config.num_hidden_layers,
        modules=len(corpus.train),
        corpus_tokens=len(tokens),
        heldout_modules=len(corpus.heldout),
        heldout_tokens=len(heldout),
        steps=done,
        batch=f"{method.sequences} x {method.tokens}",
        trained_tokens=done * method.sequences * method.tokens,
        optimizer=f"{MUON_TEXT if method.with_muon else ''}AdamW (0.9, 0.95), learning rate {method.peak:g}",
        split=split.name if split else None,
        flat_until=method.flat_until,
        minutes=seconds / 60,
        threads=threads,
        seed=seed,
        perplexity=perplexity(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32), heldout),
        perplexity_tokens=min(EVALUATION_TOKENS, len(heldout) - 1) // WINDOW_TOKENS * WINDOW_TOKENS,
        window_tokens=WINDOW_TOKENS,
    )
    (out / "README.md").write_text(model_card(out.name, facts), "utf-8")
    click.echo(f"held-out perplexity {facts.perplexity:.2f} after {done} steps; written to {out}")


if __name__ == "__main__":
    main()
