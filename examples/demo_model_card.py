"""The model card that examples/train_demo_model.py writes next to the model."""

import platform
from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingFacts:
    """Measurements of one training run that the model card reports."""

    architecture: str
    parameters: int
    hidden: int
    layers: int
    modules: int
    corpus_tokens: int
    heldout_modules: int
    heldout_tokens: int
    steps: int
    batch: str
    trained_tokens: int
    optimizer: str
    flat_until: float
    minutes: float
    threads: int
    seed: int
    perplexity: float
    perplexity_tokens: int
    window_tokens: int
    split: str | None  # name of the model whose feed-forwards were split


_KINDS = {
    "llama": "A small Llama",
    "qwen3_moe": "A small mixture of experts (qwen3_moe)",
    "mixtral": "A small mixture of experts (mixtral)",
    "qwen3_next": "A small hybrid of gated delta rules and attention (qwen3_next)",
}
_LAYERS = {
    "llama": "ffn {wide}",
    "qwen3_moe": "8 experts of {expert} of which 2 are chosen",
    "mixtral": "4 experts of {expert} of which 2 are chosen",
    "qwen3_next": "every fourth layer attends, the others have gated delta rules, ffn {wide}",
}

_TEMPLATE = """\
# {name}

{kind} that continues Python source text. It exists to be compiled, quantized and measured, not to be used.

| | |
|---|---|
| parameters | {facts.parameters:,} |
| shape | hidden {facts.hidden}, {facts.layers} layers, {heads} heads, {kv_heads} key-value heads, head width 32, {layers_have}, vocabulary 4096, context 1024, tied head |
| data | standard library of CPython {python}: {facts.modules:,} modules, {facts.corpus_tokens:,} tokens |
| held out | {facts.heldout_modules} modules ({facts.heldout_tokens:,} tokens), named in `heldout-modules.json`, text in `heldout.txt` |
| tokenizer | byte-level BPE trained on the same modules |
| training | {facts.steps:,} steps of {facts.batch} tokens ({facts.trained_tokens:,} tokens, {epochs:.2f} epochs), {facts.minutes:.1f} minutes, {facts.threads} threads, seed {facts.seed} |
| optimizer | {facts.optimizer}; weight decay 0.1 of matrices, learning rates flat to {facts.flat_until:.0%}, then linear to 2 %; bf16 autocast |
| weights | fp16 |
| held-out perplexity | **{facts.perplexity:.2f}** per token on the first {facts.perplexity_tokens:,} tokens of `heldout.txt`, in windows of {facts.window_tokens} that each begin without context; fp32 arithmetic on the fp16 weights |

Licence: the weights and this page are Apache-2.0. `heldout.txt` is CPython source text, under the PSF licence.

{made}
"""  # noqa: E501 - a table's row is one line
_SPLIT = """\
Its weights began as those of {facts.split}, whose feed-forwards were split into experts
([MoEfication](https://arxiv.org/abs/2110.01786)); half of the loss is the divergence from that model's distribution.

Made by `python -m examples.train_demo_model --split examples/models/{facts.split} --steps {facts.steps}`."""
_TRAINED = "Made by `python -m examples.train_demo_model --architecture {facts.architecture}`."


def model_card(name: str, facts: TrainingFacts) -> str:
    """The model card in Markdown."""
    epochs = facts.trained_tokens / facts.corpus_tokens
    heads = facts.hidden // 32
    return _TEMPLATE.format(
        name=name,
        facts=facts,
        made=(_SPLIT if facts.split else _TRAINED).format(facts=facts),
        heads=heads,
        kv_heads=heads // 2,
        kind=_KINDS[facts.architecture],
        layers_have=_LAYERS[facts.architecture].format(wide=3 * facts.hidden, expert=3 * facts.hidden // 4),
        epochs=epochs,
        python=platform.python_version(),
    )
