"""llama.cpp, through llama-cpp-python, loads Ingot's GGUF exports; it rounds activations to 8 bits."""

from pathlib import Path

import numpy as np
from llama_cpp import Llama

from benchmarks.adapters.loading import Logits, LogitsOf, answer

_CONTEXT_TOKENS = 256


def load(checkpoint: Path) -> LogitsOf:
    """Load with logits of every position, and float32 keys and values (its default is 16 bits)."""
    (file,) = checkpoint.glob("*.gguf")
    model = Llama(str(file), n_ctx=_CONTEXT_TOKENS, logits_all=True, type_k=0, type_v=0, verbose=False)

    def logits_of(ids: list[int]) -> Logits:
        model.reset()
        model.eval(ids)
        return np.array(model.scores[: len(ids)], np.float32)

    return logits_of


if __name__ == "__main__":
    answer(load, ("llama-cpp-python",))
