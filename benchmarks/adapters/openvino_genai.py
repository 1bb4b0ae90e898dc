"""OpenVINO GenAI's continuous batching, which its server uses: paged KV cache in 16 bits, its scheduler and sampler.

optimum-intel exports the checkpoint and NNCF quantizes it: 4 bits, asymmetric, groups of 128 or the largest power of
two that divides a matrix, head and embedding in 8 bits (NNCF's own choice). The CPU plugin's choice of precision holds
for activations, bfloat16 where the CPU has it, unless the option activations names another; its KV cache would have 8
bits, so it is set to 16, as the others have.
"""

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.adapters.base import PreparedModel, Setup, Tokens, run

EXPORT_OPTIONS = ("--weight-format", "int4", "--group-size", "128", "--group-size-fallback", "adjust", "--ratio", "1.0")
KV_PRECISION = "f16"
_HALF_BYTES = 2
_MAX_BATCH_TOKENS = 2048  # of a step; 512 and its default of 256 are slower in prefill (docs/log.md)
_BLOCK_TOKENS = 32  # of the CPU plugin's cache


def prepare(setup: Setup) -> PreparedModel:
    """Export and quantize the checkpoint, offline, if that was not done."""
    from benchmarks.shapes import SHAPES

    folder = export_int4(setup.checkpoint, setup.work_folder / "openvino" / setup.checkpoint.name)
    model = openvino.Core().read_model(folder / "openvino_model.xml")
    versions = {name: version(name) for name in ("openvino-genai", "openvino", "nncf", "optimum-intel")}
    shape = SHAPES[setup.shape]
    token_bytes = 2 * shape.num_layers * shape.kv_size * _HALF_BYTES
    activations = setup.options.get("activations") or _activation_type()
    notes = f"{' '.join(EXPORT_OPTIONS)}; KV cache {KV_PRECISION}; activations {activations}"
    return PreparedModel(folder, versions, weight_bytes(model), token_bytes, notes)


class OpenVinoGenai:
    """One pipeline without a prefix cache."""

    def __init__(self, setup: Setup, model: Path) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = _MAX_BATCH_TOKENS
        scheduler.max_num_seqs = setup.max_batch
        scheduler.num_kv_blocks = -(-setup.pool_tokens // _BLOCK_TOKENS) + 2 * setup.max_batch
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": setup.threads, "KV_CACHE_PRECISION": KV_PRECISION}
        if "activations" in setup.options:
            properties["INFERENCE_PRECISION_HINT"] = setup.options["activations"]
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", properties)
        self._handles: list[Any] = []
        self._next_id = 0

    def start(self, prompts: Tokens, max_tokens: int) -> None:
        """Step until every sequence has a token."""
        for handle in self._handles:
            handle.cancel()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        config = openvino_genai.GenerationConfig()
        config.do_sample, config.ignore_eos = False, True
        config.max_new_tokens = max_tokens - prompts.shape[1]
        self._handles = [self._add(prompt, config) for prompt in prompts]
        while not all(handle.can_read() for handle in self._handles):
            self._pipeline.step()
        for handle in self._handles:
            handle.read()

    def step(self) -> None:
        """One token for every sequence."""
        self._pipeline.step()
        for handle in self._handles:
            handle.read()

    def _add(self, prompt: Tokens, config: Any) -> Any:
        self._next_id += 1
        return self._pipeline.add_request(self._next_id, openvino.Tensor(prompt[np.newaxis]), config)


def export_int4(checkpoint: Path, folder: Path) -> Path:
    """Return the folder with OpenVINO's files; export them if it does not exist."""
    if folder.is_dir():
        return folder
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", str(checkpoint)]
    command += ["--task", "text-generation-with-past", *EXPORT_OPTIONS, str(unfinished)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"optimum's export of {checkpoint} failed:\n{done.stderr[-2000:]}")
    return unfinished.rename(folder)


def weight_bytes(model: Any) -> int:
    """Bytes of the constants from which the model's matmuls make their weights, each once."""
    constants = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() == "MatMul":
            for constant in _constants(node.input_value(1).get_node()):
                constants[constant.get_friendly_name()] = constant.get_byte_size()
    return sum(constants.values())


def _constants(node: Any) -> list[Any]:
    """Constants that a chain of conversions, subtractions, multiplications and reshapes reads."""
    if node.get_type_name() == "Constant":
        return [node]
    if node.get_type_name() not in ("Convert", "Subtract", "Multiply", "Reshape", "Transpose"):
        return []
    return [found for value in node.input_values() for found in _constants(value.get_node())]


def _activation_type() -> str:
    return str(openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT"))


if __name__ == "__main__":
    run(prepare, OpenVinoGenai)
