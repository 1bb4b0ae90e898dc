"""The trained examples end to end on the GPU: executor and engine against their models in 64-bit floats."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from benchmarks.gpu.device import Bench
from benchmarks.gpu.parts import Record, Task
from benchmarks.gpu.programs.packing import unpack_artifact
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.engine.engine import Engine
from ingot.runtime.options import EngineOptions

REFERENCE = "demo-reference.safetensors"
INVARIANT = "-invariant"  # ends the name of a form whose program is batch-invariant
_SECONDS_A_FORM, _MOST_SECONDS = 8.0, 40.0
# Largest error of a logit over the largest logit: 16-bit activations; 4-bit keys against the reference's exact ones.
LIMITS = {"16-bit": 0.02, "fp8": 0.08, "int8": 0.03, "int4": 0.4}


def demo(bench: Bench) -> list[Task]:
    """Every form of each model."""
    files = sorted(bench.programs.glob("demo-*.zip"))
    return [Task(file.stem, partial(_compared, bench, file), _MOST_SECONDS, _SECONDS_A_FORM) for file in files]


def _compared(bench: Bench, file: Path) -> Iterator[Record]:
    form = file.stem.removeprefix("demo-")
    weights, kv = weights_of(form), form.partition("-kv-")[2]
    reference = load_file(bench.programs / REFERENCE)
    wanted = {key.partition(".")[2]: value for key, value in reference.items() if key.startswith(f"{weights}.")}
    yield {"figure": "demo", "form": file.stem, **compare_with(bench, file, wanted, LIMITS[kv or "16-bit"])}


def weights_of(form: str) -> str:
    """The form with the same weights, keys of 16 bits and a usual program, which has the reference."""
    return form.partition("-kv-")[0].removesuffix(INVARIANT)


def compare_with(bench: Bench, file: Path, wanted: dict[str, NDArray[Any]], limit: float) -> Record:
    """Compute the logits of a text and greedy tokens after prompts in one engine."""
    artifact = unpack_artifact(file, bench.scratch / file.stem)
    executor = CudaExecutor(artifact, bench.machine.open(), EngineOptions(kv_blocks=256))
    rows = min(4, executor.max_sequences)
    with Engine(executor, max_sequences=rows, prefix_cache=False, identity=artifact.manifest.identity) as engine:
        tokens = greedy_tokens(engine, wanted["prompts"], wanted["tokens"].shape[1])
        logits = engine.prompt_logits(wanted["ids"])
    error = np.abs(logits - wanted["logits"])
    largest = float(np.abs(wanted["logits"]).max())
    return {
        "largest_error": float(error.max()) / largest,
        "mean_error": float(error.mean()) / largest,
        "limit": limit,
        "within": bool(error.max() <= limit * largest),
        "likeliest_equal": float((logits.argmax(1) == wanted["logits"].argmax(1)).mean()),
        "greedy_tokens_equal": float((tokens == wanted["tokens"]).mean()),
        "greedy_sequences_equal": int((tokens == wanted["tokens"]).all(axis=1).sum()),
        "greedy_sequences": len(tokens),
    }


def greedy_tokens(engine: Engine, prompts: NDArray[np.int64], new: int) -> NDArray[np.int64]:
    """Greedy tokens after each prompt [n, new]; prompts are padded with -1."""
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    completions = engine.generate([prompt[prompt >= 0].tolist() for prompt in prompts], params)
    return np.array([completion.token_ids for completion in completions])
