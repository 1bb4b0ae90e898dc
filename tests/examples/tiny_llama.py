"""A Llama of random weights, small enough to train a layer for in a test."""

# mypy: disable-error-code="no-untyped-call"
# torch and transformers leave some of their methods without annotations.

from pathlib import Path
from typing import Any

import torch
from examples.stdlib_corpus import END_OF_TEXT, Corpus, train_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def tiny_llama(**settings: Any) -> LlamaForCausalLM:
    """Two layers of width 32, in float32 and without gradients; the weights are float16's."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        **(sizes | heads | {"tie_word_embeddings": True, "initializer_range": 0.2} | settings), eos_token_id=0
    )
    model = LlamaForCausalLM(config)
    model.eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(parameter.half())
    return model


def write_tiny_llama(folder: Path, corpus: Corpus, **settings: Any) -> LlamaForCausalLM:
    """Write it in float16, with a tokenizer of the corpus; return it."""
    model = tiny_llama(**settings)
    tiny_llama(**settings).half().save_pretrained(folder)
    bpe = train_tokenizer(corpus, 320)
    PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=END_OF_TEXT).save_pretrained(folder)
    return model
