"""llama.cpp, through llama-cpp-python's low-level functions: Q4_0 matrices, head in Q6_K, 16-bit KV cache."""

from importlib.metadata import version
from typing import Any

import gguf
import llama_cpp
import numpy as np

from benchmarks.adapters.base import PeerFacts, Setup, Tokens, serve
from benchmarks.gguf_export import export_q4_0

# Prompt tokens per pass; llama.cpp's own default.
_MICRO_BATCH_TOKENS = 512
# on or off, whichever is faster: see docs/benchmarks.md
FLASH_ATTENTION = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED


class LlamaCpp:
    """One model, and one context per batch size, each with as many KV streams as it has sequences."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._path = export_q4_0(setup.checkpoint, setup.work_folder / "llama_cpp", setup.threads)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(self._path).encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {self._path}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._contexts: dict[int, Any] = {}
        self._batch = llama_cpp.llama_batch_init(setup.max_batch * setup.max_tokens, 0, 1)
        self._next = np.zeros(0, np.int64)  # [batch] the tokens of the next step
        self._position = 0

    def facts(self) -> PeerFacts:
        """Sizes come from the GGUF file; an untied embedding is only gathered from, and so not counted."""
        sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(self._path).tensors}
        if "output.weight" in sizes:
            del sizes["token_embd.weight"]
        versions = {name: version(name) for name in ("llama-cpp-python", "gguf")}
        return PeerFacts(versions, sum(sizes.values()), _system_info())

    def start(self, prompts: Tokens, new_tokens: int) -> None:
        """Decode all prompts as one batch of sequences, which llama.cpp cuts into passes of 512 tokens."""
        batch, tokens = prompts.shape
        context = self._context(batch)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        positions = np.tile(np.arange(tokens), batch)
        wanted = positions == tokens - 1
        self._fill(prompts.ravel(), positions, np.repeat(np.arange(batch), tokens), wanted)
        self._position = tokens
        self._decode(context, batch)

    def step(self) -> None:
        """Decode one token of every sequence."""
        batch = len(self._next)
        positions = np.full(batch, self._position)
        self._fill(self._next, positions, np.arange(batch), np.ones(batch, bool))
        self._position += 1
        self._decode(self._context(batch), batch)

    def _context(self, batch: int) -> Any:
        if batch not in self._contexts:
            self._contexts[batch] = llama_cpp.llama_init_from_model(self._model, self._context_params(batch))
        return self._contexts[batch]

    def _context_params(self, batch: int) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = batch * self._setup.max_tokens
        params.n_batch = batch * self._setup.max_tokens
        params.n_ubatch = _MICRO_BATCH_TOKENS
        params.n_seq_max = batch
        params.n_threads = params.n_threads_batch = self._setup.threads
        params.flash_attn_type = FLASH_ATTENTION
        params.kv_unified = False
        params.no_perf = True
        return params

    def _fill(self, tokens: Tokens, positions: Tokens, sequences: Tokens, wanted: Any) -> None:
        count = len(tokens)
        self._batch.n_tokens = count
        _view(self._batch.token, count)[:] = tokens
        _view(self._batch.pos, count)[:] = positions
        _view(self._batch.n_seq_id, count)[:] = 1
        _view(self._batch.logits, count)[:] = wanted
        for index, sequence in enumerate(sequences.tolist()):
            self._batch.seq_id[index][0] = sequence

    def _decode(self, context: Any, batch: int) -> None:
        status = llama_cpp.llama_decode(context, self._batch)
        if status != 0:
            raise RuntimeError(f"llama_decode of {self._batch.n_tokens} tokens ended with status {status}")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (batch, self._vocab_size))
        self._next = logits.argmax(axis=1)


def _view(pointer: Any, count: int) -> Any:
    """The C array at a pointer as a numpy array, without a copy."""
    return np.ctypeslib.as_array(pointer, (count,))


def _system_info() -> str:
    text = llama_cpp.llama_print_system_info()
    assert isinstance(text, bytes)
    return text.decode().strip()


if __name__ == "__main__":
    serve(LlamaCpp)
