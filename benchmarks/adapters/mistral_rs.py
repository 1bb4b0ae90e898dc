"""mistral.rs, through its Python package: whole requests, whose times the engine reports itself.

Option: file_type, as llama.cpp's adapter has it, and the same GGUF file, whose weights it copies. The package takes
text, not tokens: prompts are letters that its tokenizer makes into the wanted number of tokens. Requests of a batch are
sent together. Its thread pool, rayon's, has as many threads as the setup says.
"""

import os
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.adapters.base import PreparedModel, Setup, Timing, Tokens, run

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_LETTERS_PER_TOKEN = 3  # two at most become one token
_TEMPLATE = "{{ messages[0]['content'] }}"


def prepare(setup: Setup) -> PreparedModel:
    """The GGUF file of llama.cpp's adapter."""
    from benchmarks.adapters import llama_cpp

    model = llama_cpp.prepare(setup)
    types = model.notes.partition(";")[0]
    notes = f"{types}; GGUF, copied; KV cache f16; times that the engine reports; prompts of letters"
    return replace(model, versions={"mistralrs": version("mistralrs")}, notes=notes)


class MistralRs:
    """One runner without a prefix cache."""

    def __init__(self, setup: Setup, model: Path) -> None:
        os.environ["RAYON_NUM_THREADS"] = str(setup.threads)
        import mistralrs

        self._mistralrs = mistralrs
        source = mistralrs.Which.GGUF(
            quantized_model_id=str(model.parent), quantized_filename=model.name, tok_model_id=str(setup.checkpoint)
        )
        with tempfile.TemporaryDirectory() as folder:
            template = Path(folder) / "prompt.jinja"
            template.write_text(_TEMPLATE, "utf-8")
            self._runner = mistralrs.Runner(
                source, max_seqs=setup.max_batch, prefix_cache_n=0, jinja_explicit=str(template)
            )

    def prefill(self, prompts: Tokens) -> Timing:
        """From the prompts to the first token of each."""
        usages = self._generate(prompts, 1)
        return Timing(max(usage.total_prompt_time_sec for usage in usages), None, 1)

    def decode(self, prompts: Tokens, steps: int) -> Timing:
        """Tokens after the first one of each prompt.

        The sequence whose prompt is computed last decodes next to all others all the time: its time is the shortest.
        """
        usages = self._generate(prompts, steps + 1)
        return Timing(min(usage.total_completion_time_sec for usage in usages), None, steps)

    def _generate(self, prompts: Tokens, new_tokens: int) -> list[Any]:
        texts = [self._text(row) for row in prompts]
        streams = [self._runner.send_chat_completion_request(self._request(text, new_tokens)) for text in texts]
        usages = [_last_usage(stream) for stream in streams]
        for usage in usages:
            made = (usage.prompt_tokens, usage.completion_tokens)
            if made != (prompts.shape[1], new_tokens):
                raise RuntimeError(f"mistral.rs counts {made} tokens of a request of {(prompts.shape[1], new_tokens)}")
        return usages

    def _request(self, text: str, new_tokens: int) -> Any:
        return self._mistralrs.ChatCompletionRequest(
            messages=[{"role": "user", "content": text}],
            model="default",
            max_tokens=new_tokens,
            temperature=0.0,
            stream=True,
            ignore_eos=True,
        )

    def _text(self, row: Tokens) -> str:
        """Letters of as many tokens as the row has, chosen by the row."""
        drawn = np.random.default_rng(row).integers(0, len(_LETTERS), _LETTERS_PER_TOKEN * len(row))
        letters = "".join(_LETTERS[index] for index in drawn)
        low, high = 1, len(letters)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._tokens(letters[:middle]) < len(row) else (low, middle)
        return letters[:low]

    def _tokens(self, text: str) -> int:
        return len(self._runner.tokenize_text(text, False, None))


def _last_usage(stream: Any) -> Any:
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
    if usage is None:
        raise RuntimeError("mistral.rs ended a request without its usage")
    return usage


if __name__ == "__main__":
    run(prepare, MistralRs)
