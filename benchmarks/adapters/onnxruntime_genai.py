"""onnxruntime-genai with a model of its own builder: int4, block 32, int8 activations, 32-bit KV cache.

The builder's defaults for the CPU (packed q|k|v, int4 head) and one option in its favour: the head is computed for the
last prompt token alone, as the others do. A generator takes 32 sequences at most: larger batches are several generators
that step in turn.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnxruntime_genai as og

from benchmarks.adapters.base import PreparedModel, Setup, Tokens, run

BUILDER_OPTIONS = ("accuracy_level=4", "block_size=32", "prune_lm_head=true", "hf_token=false")
_MOST_SEQUENCES = 32  # of a generator
_FLOAT_BYTES = 4


def prepare(setup: Setup) -> PreparedModel:
    """Build the model, if that was not done. Sizes come from the ONNX file: packed weights and their scales."""
    # onnx is imported here alone, so that it takes no memory where the engine runs
    from benchmarks.adapters.onnx_bytes import weight_bytes
    from benchmarks.shapes import SHAPES

    folder = build_int4(setup.checkpoint, setup.work_folder / "onnxruntime_genai" / setup.checkpoint.name)
    versions = {name: version(name) for name in ("onnxruntime-genai", "onnxruntime")}
    shape = SHAPES[setup.shape]
    token_bytes = 2 * shape.num_layers * shape.kv_size * _FLOAT_BYTES
    notes = f"{' '.join(BUILDER_OPTIONS)}; KV cache float32, in place (it has no other on a CPU)"
    return PreparedModel(folder, versions, weight_bytes([folder / "model.onnx"]), token_bytes, notes)


class OnnxRuntimeGenai:
    """One model; a new generator, with a KV cache of its own, for each start."""

    def __init__(self, setup: Setup, model: Path) -> None:
        config = og.Config(str(model))
        threads = {"session_options": {"intra_op_num_threads": setup.threads}}
        config.overlay(json.dumps({"model": {"decoder": threads}}))
        self._model = og.Model(config)
        self._generators: list[og.Generator] = []

    def start(self, prompts: Tokens, max_tokens: int) -> None:
        """Run the prompts and sample the first token; the length is fixed, so that no end of text stops a sequence."""
        self._generators = []  # frees their caches
        for begin in range(0, len(prompts), _MOST_SEQUENCES):
            self._generators.append(self._generator(prompts[begin : begin + _MOST_SEQUENCES], max_tokens))

    def step(self) -> None:
        """One token for every sequence."""
        for generator in self._generators:
            generator.generate_next_token()

    def _generator(self, prompts: Tokens, max_tokens: int) -> og.Generator:
        params = og.GeneratorParams(self._model)
        params.set_search_options(
            batch_size=len(prompts),
            max_length=max_tokens,
            min_length=max_tokens,
            do_sample=False,
            past_present_share_buffer=True,
        )
        generator = og.Generator(self._model, params)
        generator.append_tokens(prompts.astype(np.int32))
        generator.generate_next_token()
        return generator


def build_int4(checkpoint: Path, folder: Path) -> Path:
    """Return the folder with the model of genai's own builder; build it offline if it does not exist."""
    if folder.is_dir():
        return folder
    unfinished, cache = folder.with_suffix(".unfinished"), folder.with_suffix(".cache")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint), "-o", str(unfinished)]
    command += ["-p", "int4", "-e", "cpu", "-c", str(cache), "--extra_options", *BUILDER_OPTIONS]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    shutil.rmtree(cache, ignore_errors=True)
    if done.returncode != 0:
        raise RuntimeError(f"genai's model builder failed on {checkpoint}:\n{done.stderr[-2000:]}")
    return unfinished.rename(folder)


if __name__ == "__main__":
    run(prepare, OnnxRuntimeGenai)
