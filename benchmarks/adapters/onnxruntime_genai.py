"""onnxruntime-genai with a model of its own builder: int4, block 32, int8 activations, 32-bit KV cache.

The builder's defaults for the CPU (packed q|k|v, int4 head) and one option in its favour: the head is computed for the
last prompt token alone, as the others do.
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

from benchmarks.adapters.base import PeerFacts, Setup, Tokens, serve
from benchmarks.adapters.onnx_bytes import weight_bytes

BUILDER_OPTIONS = ("accuracy_level=4", "block_size=32", "prune_lm_head=true", "hf_token=false")


class OnnxRuntimeGenai:
    """One model; a new generator, with a KV cache of its own, per measurement."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._folder = build_int4(setup.checkpoint, setup.work_folder / "onnxruntime_genai")
        config = og.Config(str(self._folder))
        threads = {"session_options": {"intra_op_num_threads": setup.threads}}
        config.overlay(json.dumps({"model": {"decoder": threads}}))
        self._model = og.Model(config)
        self._generator: og.Generator | None = None

    def facts(self) -> PeerFacts:
        """Sizes come from the ONNX file: packed weights and their scales."""
        versions = {name: version(name) for name in ("onnxruntime-genai", "onnxruntime")}
        return PeerFacts(versions, weight_bytes([self._folder / "model.onnx"]), " ".join(BUILDER_OPTIONS))

    def start(self, prompts: Tokens, new_tokens: int) -> None:
        """Run the prompts and sample the first token; the length is fixed, so that no end of text stops a sequence."""
        batch, tokens = prompts.shape
        params = og.GeneratorParams(self._model)
        length = tokens + new_tokens
        params.set_search_options(batch_size=batch, max_length=length, min_length=length, do_sample=False)
        self._generator = og.Generator(self._model, params)
        self._generator.append_tokens(prompts.astype(np.int32))
        self._generator.generate_next_token()

    def step(self) -> None:
        """One token for every sequence."""
        assert self._generator is not None
        self._generator.generate_next_token()


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
    serve(OnnxRuntimeGenai)
