"""llama.cpp with a long context that it computes in part: later prompt tokens get copies of computed keys and values.

The first `computed_tokens` are decoded. Their state is restored as a second sequence, moved to later positions (which
rotates its keys to them), and joined to the first, until the cache holds the prompt.
"""

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.adapters.base import Setup, Tokens, run
from benchmarks.adapters.llama_cpp import LlamaCpp, prepare

_PROMPT, _COPY = 0, 1  # sequences
_TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}


class LlamaCppLongContext(LlamaCpp):
    """One context of one stream, with the KV type of the options; flash attention is on, as quantized values need."""

    def __init__(self, setup: Setup, model: Path) -> None:
        super().__init__(setup, model)
        self._computed_tokens = int(setup.options["computed_tokens"])
        self._cached = np.zeros(0, np.int64)  # the prompt that the cache holds

    def start(self, prompts: Tokens, max_tokens: int) -> None:
        """Fill the cache with the prompt, unless it has it, and decode the prompt's last token."""
        (prompt,) = prompts
        context = self._context(
            1, self._setup.max_tokens
        )  # one for all contexts: the cache of a longer prompt has a shorter one's room
        if not np.array_equal(prompt, self._cached):
            self._fill_cache(context, prompt)
            self._cached = prompt
        self._position = len(prompt) - 1
        memory = llama_cpp.llama_get_memory(context)
        if not llama_cpp.llama_memory_seq_rm(memory, _PROMPT, self._position, -1):
            raise RuntimeError(f"llama.cpp cannot remove the tokens from position {self._position} on")
        self._next = prompt[-1:]
        self.step()

    def _fill_cache(self, context: Any, prompt: Tokens) -> None:
        memory, computed = llama_cpp.llama_get_memory(context), min(self._computed_tokens, len(prompt))
        llama_cpp.llama_memory_clear(memory, True)
        wanted = np.arange(computed) == computed - 1
        self._fill(prompt[:computed], np.arange(computed), np.zeros(computed, np.int64), wanted)
        self._decode(context, 1)
        state = _state(context)
        for begin in range(computed, len(prompt), computed):
            if llama_cpp.llama_state_seq_set_data(context, state, len(state), _COPY) == 0:
                raise RuntimeError(
                    f"llama.cpp cannot restore {computed} tokens after {begin}; is its context too short?"
                )
            llama_cpp.llama_memory_seq_add(memory, _COPY, 0, -1, begin)
            llama_cpp.llama_memory_seq_cp(memory, _COPY, _PROMPT, -1, -1)
            llama_cpp.llama_memory_seq_rm(memory, _COPY, -1, -1)
        assert llama_cpp.llama_memory_seq_pos_max(memory, _PROMPT) >= len(prompt) - 1

    def _context_params(self, batch: int, max_tokens: int) -> Any:
        params = super()._context_params(batch, max_tokens)
        params.n_ctx += self._computed_tokens  # the last copy may exceed the prompt
        params.n_seq_max, params.kv_unified = 2, True  # both sequences in one stream
        params.type_k = params.type_v = _TYPES[str(self._setup.options["kv"])]
        return params


def _state(context: Any) -> Any:
    """Keys, values and positions of the prompt's sequence, as llama.cpp stores them."""
    size = llama_cpp.llama_state_seq_get_size(context, _PROMPT)
    state = (ctypes.c_uint8 * size)()
    written = llama_cpp.llama_state_seq_get_data(context, state, size, _PROMPT)
    assert written == size, (written, size)
    return state


if __name__ == "__main__":
    run(prepare, LlamaCppLongContext)
