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
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from examples.cpu_training import ATTENTION_BY_SEQUENCE, SORTED_EXPERTS, register
from examples.demo_model_card import TrainingFacts, model_card
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
from examples.training import (
    EVALUATION_TOKENS,
    WINDOW_TOKENS,
    Budget,
    Method,
    batches,
    language_losses,
    perplexity,
    train,
)
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

HEAD_WIDTH = 32
MUON_TEXT = "Muon for the matrices of hidden layers, learning rate 3e-2; others "
NUM_PARTS = 4  # experts that a feed-forward is split into
CHOSEN_PARTS = 2


METHODS = {
    "llama": Method(),
    "qwen3_moe": Method(sequences=4, tokens=512, with_muon=True, flat_until=0.3),
    "qwen3_next": Method(),
    "mixtral": Method(flat_until=0.2, peak=1e-3),
}
ARCHITECTURES = ("llama", "qwen3_moe", "qwen3_next")  # that train from random weights


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
    batch = next(batches(tokens, Method(sequences=32, tokens=512), seed + 1))
    how = {"experts_implementation": SORTED_EXPERTS, "attn_implementation": ATTENTION_BY_SEQUENCE}
    return split_experts(dense, batch, NUM_PARTS, CHOSEN_PARTS, **how)


def write_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, corpus: Corpus, folder: Path) -> None:
    """Write the checkpoint in fp16, the tokenizer, the chat template and the held-out text."""
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.copy(Path(__file__).parent / "models/stdlib-llama-6m/chat_template.jinja", folder)
    (folder / "heldout.txt").write_text(corpus.heldout_text, "utf-8")
    names = [module.name for module in corpus.heldout]
    (folder / "heldout-modules.json").write_text(json.dumps(names, indent=0), "utf-8")


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
    done = train(model, partial(language_losses, model, teacher), tokens, method, Budget(steps, 60 * minutes), seed)
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
