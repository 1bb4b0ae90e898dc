r"""Train a multi-token prediction layer for a Llama of examples/models, and leave its own weights unchanged.

    pip install --group oracle            # torch and transformers
    python -m examples.train_mtp_layer --minutes 60 --out my-model

The layer learns what the model itself would write next, one, two and three tokens after the one it has just chosen:
half of the text is the corpus of the model, half the model's own continuations of it. Writes a checkpoint in MiMo's
form (fp16), the model's tokenizer, and a model card with the measured acceptance. The same seed, steps, threads, Python
and torch give the same layer; with --minutes, the program's own on a processor, the machine's speed decides the steps.
"""

# mypy: disable-error-code="no-untyped-call"
# torch and transformers leave some of their methods without annotations.

import platform
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import numpy as np
import torch
from examples.cpu_training import HeadLoss
from examples.mimo_checkpoint import load_checkpoint, refuse_unfit, write_checkpoint
from examples.mtp_acceptance import CONTINUED_TOKENS, NUM_WINDOWS, Acceptance, continue_greedily, measure_both
from examples.mtp_layer import MtpLayer, make_layer, run_base, unroll
from examples.stdlib_corpus import END_OF_TEXT_ID, encode_modules, read_corpus
from examples.training import MUON_LEARNING_RATE, Budget, Method, batches, train
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM, PreTrainedModel

BASE = Path(__file__).parent / "models" / "stdlib-llama-6m"
DEPTH_WEIGHTS = (1.0, 0.8, 0.6)
METHOD = Method(sequences=2, with_muon=True, warm_up=30)
FITTED = Method(sequences=64, tokens=512)  # tokens that the first projection is fitted to
TEACHER_SHARE = 0.9  # share of the divergence in the loss
NUM_PROMPTS = 512
PROMPT_TOKENS = 64
_AT_ONCE = 64  # prompts


@dataclass(frozen=True)
class LayerFacts:
    """Measurements of one training run that the model card reports."""

    base: str
    parameters: int
    base_parameters: int
    modules: int
    corpus_tokens: int
    steps: int
    minutes: float
    threads: int
    seed: int
    continued: Acceptance
    text: Acceptance


def add_continuations(base: PreTrainedModel, tokens: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """The tokens, and as many of the model's own: pieces of the text that it continued, over and over.

    A draft is of what the model writes, not of its corpus (Zhou et al. 2023, DistillSpec, arXiv 2310.08461).
    """
    starts = np.random.default_rng(seed + 1).integers(0, len(tokens) - PROMPT_TOKENS, NUM_PROMPTS)
    prompts = torch.from_numpy(np.stack([tokens[start : start + PROMPT_TOKENS] for start in starts]))
    count = METHOD.tokens - PROMPT_TOKENS - 1
    written = torch.cat([continue_greedily(base, some, count) for some in prompts.split(_AT_ONCE)])
    own = torch.nn.functional.pad(written, (0, 1), value=END_OF_TEXT_ID).flatten().numpy()
    return np.concatenate([tokens, np.resize(own, len(tokens))])


def draft_losses(base: PreTrainedModel, layer: MtpLayer, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of depth 1, and the weighted losses of all depths, mostly divergence from the model's own."""
    head, depths = base.lm_head.weight, len(DEPTH_WEIGHTS)
    with torch.autocast("cpu", torch.bfloat16):
        states = run_base(base, batch[:, :-1])
        found = unroll(layer, states, depths)
    whole, first = torch.zeros(()), None
    for depth, (hidden, weight) in enumerate(zip(found, DEPTH_WEIGHTS, strict=True)):
        taught = states.normed[:, depth + 1 :].flatten(0, 1), head
        targets = batch[:, depth + 2 :].flatten()
        loss = HeadLoss.apply(hidden[:, depth:].flatten(0, 1), head, targets, taught, TEACHER_SHARE)
        whole, first = whole + weight * loss, loss if first is None else first
    assert first is not None
    return first, whole


def train_layer(base: PreTrainedModel, tokens: NDArray[np.int64], budget: Budget, seed: int) -> tuple[MtpLayer, int]:
    """A trained layer, and the number of steps."""
    layer = make_layer(base, next(batches(tokens, FITTED, seed)))
    return layer, train(layer, partial(draft_losses, base, layer), tokens, METHOD, budget, seed)


_MODEL_PAGE = """\
# {name}

{facts.base} with a multi-token prediction (MTP) layer, in the form of Xiaomi's MiMo
([arXiv 2505.07608](https://arxiv.org/abs/2505.07608)). It exists to be compiled and measured with drafts from its own
layer, not to be used.

| | |
|---|---|
| model | [{facts.base}](../{facts.base}/README.md), bit for bit: {facts.base_parameters:,} parameters; the biases of queries, keys and values, which MiMo has and a Llama lacks, are 0 |
| MTP layer | {facts.parameters:,} parameters: two norms, a projection of hidden state and embedding, a decoder layer like the model's, a norm; embedding and head are the model's |
| hidden state | before the model's final norm; for a longer draft, the layer's own result after `final_layernorm` |
| keys of attention | of past positions those made from the model's hidden states, of drafts the layer's own: so it is trained, and so it should run |
| data | standard library of CPython {python}: {facts.modules:,} modules, {facts.corpus_tokens:,} tokens, those of the model; as much again is the model's greedy continuations of {prompts} pieces of it |
| held out | the modules in the model's `heldout-modules.json`, text in its [`heldout.txt`](../{facts.base}/heldout.txt) |
| training | {facts.steps:,} steps of {batch} tokens ({trained:,} tokens), {facts.minutes:.1f} minutes, {facts.threads} threads, seed {facts.seed}; the projection begins as a ridge regression on {fitted:,} tokens |
| loss | drafts 1, 2 and 3 with weights {weights}; each {share:.0%} divergence from the model's distribution, the rest cross-entropy |
| optimizer | Muon for matrices, learning rate {muon:g}; AdamW (0.9, 0.95) for the rest, {method.peak:g}; flat to {method.flat_until:.0%}, then linear to 2 %; bf16 autocast |
| weights | fp16 |

Acceptance: the share of drafts that are the model's own greedy tokens, given that the drafts before them were.
{windows} pieces of the held-out text; {counted:,} drafts of depth 1; fp32 arithmetic on the fp16 weights.

| | depth 1 | depth 2 | depth 3 | tokens a step with 3 drafts |
|---|---|---|---|---|
| greedy continuations by the model, {continued_tokens} tokens each | {continued} |
| the text as it is | {text} |

    python -m examples.mtp_acceptance examples/models/{name} \\
        --text examples/models/{facts.base}/heldout.txt

Made by `python -m examples.train_mtp_layer --steps {facts.steps}`.

Licence: the weights and this page are Apache-2.0. The text it was trained on is CPython's, under the
[PSF licence](https://docs.python.org/3.11/license.html).
"""  # noqa: E501 - a table's row is one line


def model_card(name: str, facts: LayerFacts) -> str:
    """The model card in Markdown."""

    def row(found: Acceptance) -> str:
        return " | ".join([*(f"{share:.1%}" for share in found.shares), f"{found.tokens_per_step:.2f}"])

    return _MODEL_PAGE.format(
        name=name,
        facts=facts,
        python=platform.python_version(),
        prompts=NUM_PROMPTS,
        batch=f"{METHOD.sequences} x {METHOD.tokens}",
        trained=facts.steps * METHOD.sequences * METHOD.tokens,
        fitted=FITTED.sequences * FITTED.tokens,
        weights=", ".join(f"{weight:g}" for weight in DEPTH_WEIGHTS),
        share=TEACHER_SHARE,
        muon=MUON_LEARNING_RATE,
        method=METHOD,
        windows=NUM_WINDOWS,
        counted=facts.continued.counted[0],
        continued_tokens=CONTINUED_TOKENS,
        continued=row(facts.continued),
        text=row(facts.text),
    )


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write; must not exist.")
@click.option(
    "--base",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=BASE,
    show_default="examples/models/stdlib-llama-6m",
    help="Folder of the Llama that the layer is for.",
)
@click.option("--minutes", type=click.FloatRange(min=0.1), default=60.0, show_default=True, help="Processor time.")
@click.option("--steps", type=click.IntRange(min=1), help="Train exactly so many steps instead.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def main(out: Path, base: Path, minutes: float, steps: int | None, threads: int, seed: int) -> None:
    """Corpus, continuations, training, files, evaluation: in this order."""
    if out.exists():
        raise click.UsageError(f"--out {out} exists; name a new folder")
    try:
        refuse_unfit(base)
    except ValueError as problem:
        raise click.UsageError(f"--base {problem}") from None
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    corpus = read_corpus()
    bpe = Tokenizer.from_file(str(base / "tokenizer.json"))
    text = encode_modules(bpe, corpus.train, seed)
    click.echo(f"{len(corpus.train)} modules, {len(text) / 1e6:.1f} million tokens")
    begin = time.thread_time()
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32).eval().requires_grad_(False)
    tokens = add_continuations(model, text, seed)
    layer, done = train_layer(model, tokens, Budget(steps, 60 * minutes), seed)
    seconds = time.thread_time() - begin
    write_checkpoint(base, layer, out)
    heldout = np.array(bpe.encode(corpus.heldout_text).ids, dtype=np.int64)
    continued, as_is = measure_both(*load_checkpoint(out), heldout)
    facts = LayerFacts(
        base=base.resolve().name,
        parameters=sum(parameter.numel() for parameter in layer.parameters()),
        base_parameters=model.num_parameters(),
        modules=len(corpus.train),
        corpus_tokens=len(text),
        steps=done,
        minutes=seconds / 60,
        threads=threads,
        seed=seed,
        continued=continued,
        text=as_is,
    )
    (out / "README.md").write_text(model_card(out.name, facts), "utf-8")
    click.echo(f"acceptance in greedy continuations {continued} after {done} steps; written to {out}")


if __name__ == "__main__":
    main()
