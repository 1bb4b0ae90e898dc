"""llama.cpp, through the functions that its own programs call: Python fills a batch and takes the argmax, no more.

Options: file_type (a row of gguf_export.FILE_TYPES). Keys and values are in 16 bits.
"""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.adapters.base import PreparedModel, Setup, Tokens, run

# Prompt tokens per pass; llama.cpp's own default.
_MICRO_BATCH_TOKENS = 512
# on or off, whichever is faster: see docs/benchmarks.md
FLASH_ATTENTION = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
_HALF_BYTES = 2


def prepare(setup: Setup) -> PreparedModel:
    """Convert the checkpoint. Sizes come from the GGUF file; an untied embedding is only gathered from: not counted."""
    # the reader and the converter are imported here alone, so that they take no memory where the engine runs
    import gguf

    from benchmarks.gguf_export import export_quantized
    from benchmarks.hybrids import ALL_SHAPES

    file_type = str(setup.options["file_type"])
    path = export_quantized(setup.checkpoint, setup.work_folder / "llama_cpp", file_type, setup.threads)
    tensors = gguf.GGUFReader(path).tensors
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in tensors}
    if "output.weight" in sizes:
        del sizes["token_embd.weight"]
    types = ", ".join(sorted({tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1}))
    versions = {name: version(name) for name in ("llama-cpp-python", "gguf")}
    shape = ALL_SHAPES[setup.shape]
    token_bytes = 2 * shape.kv_layers * shape.kv_size * _HALF_BYTES
    notes = f"matrices {types}; KV cache f16; {_system_info()}"
    return PreparedModel(path, versions, sum(sizes.values()), token_bytes, notes)


class LlamaCpp:
    """One model, and one context with as many KV streams as it has sequences; another batch makes another context."""

    def __init__(self, setup: Setup, model: Path) -> None:
        self._setup = setup
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        # what is not repacked, such as the head, would stay in the small pages of the mapped file
        params.use_mmap = False
        self._model = llama_cpp.llama_model_load_from_file(str(model).encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._made: Any = None
        self._made_for = (0, 0)  # sequences, tokens of each
        self._batch = llama_cpp.llama_batch_init(setup.pool_tokens, 0, 1)
        self._next = np.zeros(0, np.int64)  # [batch] the tokens of the next step
        self._position = 0

    def start(self, prompts: Tokens, max_tokens: int) -> None:
        """Decode all prompts as one batch of sequences, which llama.cpp cuts into passes of 512 tokens."""
        batch, tokens = prompts.shape
        context = self._context(batch, max_tokens)
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
        self._decode(self._made, batch)

    def _context(self, batch: int, max_tokens: int) -> Any:
        if self._made_for != (batch, max_tokens):
            if self._made:
                llama_cpp.llama_free(self._made)
            self._made = llama_cpp.llama_init_from_model(self._model, self._context_params(batch, max_tokens))
            self._made_for = (batch, max_tokens)
        if not self._made:
            raise RuntimeError(f"llama.cpp cannot make a context of {batch} sequences of {max_tokens} tokens")
        return self._made

    def _context_params(self, batch: int, max_tokens: int) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = batch * max_tokens
        params.n_batch = batch * max_tokens
        params.n_ubatch = _MICRO_BATCH_TOKENS
        params.n_seq_max = batch
        params.n_threads = params.n_threads_batch = self._setup.threads
        params.flash_attn_type = FLASH_ATTENTION
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F16
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
    run(prepare, LlamaCpp)
