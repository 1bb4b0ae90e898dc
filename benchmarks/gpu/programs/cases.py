"""Build small models with weights, without a GPU: those that check every kernel, and the trained examples.

check-*.zip      families and precisions over tiny checkpoints
demo-*.zip       the demo model as each recipe stores it, and the hybrid; demo-reference.safetensors: what their
                 nodes and stored weights mean in 64-bit floats (engines on a CPU round activations of 4-bit matmuls)
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tests.simulators.float64_ir import Float64Runner, float64_logits

from benchmarks.gpu.programs.packing import pack_artifact
from benchmarks.gpu.proofs.demo import INVARIANT, REFERENCE, weights_of
from benchmarks.paths import ROOT
from ingot.artifact import Artifact
from ingot.builder import build
from ingot.passes.manager import PassManager
from ingot.pipeline.compile import open_source
from ingot.pipeline.recipe.load import load_recipe
from ingot.runtime.text.tokenizer import Tokenizer

DEMO_MODEL, _HYBRID_MODEL = (ROOT / "examples" / "models" / name for name in ("stdlib-llama-6m", "stdlib-hybrid-4m"))
_FIXTURES = ROOT / "tests" / "fixtures" / "checkpoints"
_PREPARED = ("fold-constants", "pack-projections", "fuse-gated-activation")
_UNMEASURED = ("evaluation=null", "latency=null", "gates={}")
_LOGIT_TOKENS, _PROMPT_TOKENS, _NEW_TOKENS = 128, (3, 20, 47, 64), 48

Options = Mapping[str, Mapping[str, object]]


@dataclass(frozen=True)
class Case:
    """A model and how it is stored and computed."""

    checkpoint: str
    activations: str = "float16"
    passes: tuple[Options, ...] = ()

    @property
    def name(self) -> str:
        """llama-bfloat16-quantize-weights-4-32-quantize-kv-cache-int8"""
        options = ["-".join([key, *map(str, value.values())]) for one in self.passes for key, value in one.items()]
        return "-".join([self.checkpoint, self.activations, *options])


def _weights(bits: int, block: int | str, symmetric: bool = False) -> Options:
    return {"quantize-weights": {"bits": bits, "block_size": block, "symmetric": symmetric}}


def _keys(precision: str) -> Options:
    return {"quantize-kv-cache": {"precision": precision, "group": 0}}


CASES = (
    Case("llama"),
    Case("llama", "bfloat16"),
    Case("llama", "float16", (_weights(4, 32), _keys("int8"))),
    Case("llama", "bfloat16", (_weights(4, 64, symmetric=True), _keys("fp8"))),
    Case("llama", "bfloat16", (_weights(8, "channel", symmetric=True), _keys("int4"))),
    Case("gemma2", "bfloat16", (_weights(4, 32),)),
    Case("qwen3", "bfloat16", (_keys("int8"),)),
    Case("mistral", "float16", (_keys("fp8"),)),
    Case("phi3-partial-rotary", "float16", (_keys("int4"),)),
    Case("qwen3_5_text", "bfloat16"),
    Case("falcon_h1", "float16"),
    Case("glm4_moe_lite", "bfloat16"),
)
DEMO: Mapping[str, tuple[Path, tuple[Options, ...]]] = {  # weights, and keys after "-kv-"
    "fp16": (DEMO_MODEL, ()),
    "int4": (DEMO_MODEL, (_weights(4, 128),)),
    f"int4{INVARIANT}": (DEMO_MODEL, (_weights(4, 128),)),
    "int4-kv-fp8": (DEMO_MODEL, (_weights(4, 128), _keys("fp8"))),
    "int4-kv-int8": (DEMO_MODEL, (_weights(4, 128), _keys("int8"))),
    "int4-kv-int4": (DEMO_MODEL, (_weights(4, 128), _keys("int4"))),
    "hybrid-int4": (_HYBRID_MODEL, (_weights(4, 128),)),
}


def write_cases(folder: Path) -> None:
    """Pack an artifact of each case."""
    for case in CASES:
        with TemporaryDirectory() as scratch:
            pack_artifact(case_artifact(case, Path(scratch), 90), folder / f"check-{case.name}.zip")


def case_artifact(case: Case, folder: Path, sm: int) -> Artifact:
    """A case built for an SM."""
    gpu = {"activations": case.activations, "decode_rows": [1, 4, 16], "prefill_rows": [16]}
    return built(folder, _FIXTURES / case.checkpoint, case.passes, f"cuda-sm{sm}", gpu=gpu)


def write_demo(folder: Path) -> None:
    """Pack the trained examples in every form, with the exact results of those with keys of 16 bits."""
    reference: dict[str, NDArray[Any]] = {}
    with TemporaryDirectory() as scratch:
        for name, (checkpoint, passes) in DEMO.items():
            gpu = {"decode_rows": [1, 4], "prefill_rows": [32, 128], "batch_invariant": INVARIANT in name}
            pack_artifact(built(Path(scratch), checkpoint, passes, gpu=gpu), folder / f"demo-{name}.zip")
            if weights_of(name) != name:
                continue
            model = transformed(Path(scratch), checkpoint, passes)
            found = reference_of(model, _text_ids(), _LOGIT_TOKENS, _PROMPT_TOKENS, _NEW_TOKENS)
            reference |= {f"{name}.{key}": value for key, value in found.items()}
    save_file(reference, folder / REFERENCE)


def reference_of(
    model: ir.Model, ids: NDArray[np.int64], scored: int, prompt_tokens: Sequence[int], new: int
) -> dict[str, NDArray[Any]]:
    """The model's logits [scored, vocab] of the first ids, and greedy tokens [n, new] after the prompts, in float64.

    prompts [n, longest], padded with -1, are slices of the ids.
    """
    prompts = np.full((len(prompt_tokens), max(prompt_tokens)), -1, np.int64)
    for row, count in enumerate(prompt_tokens):
        prompts[row, :count] = ids[row * count : (row + 1) * count]
    tokens = np.array([_greedy(model, prompt[prompt >= 0].tolist(), new) for prompt in prompts])
    logits = float64_logits(model, ids[:scored].tolist()).astype(np.float32)
    return {"ids": ids[:scored], "logits": logits, "prompts": prompts, "tokens": tokens}


def _greedy(model: ir.Model, prompt: list[int], new: int) -> list[int]:
    runner, given, made = Float64Runner(model), prompt, list[int]()
    for _ in range(new):
        made.append(int(runner.step({0: given})[0][-1].argmax()))
        given = made[-1:]
    return made


def _text_ids() -> NDArray[np.int64]:
    """Token ids of the demo model's held-out text, which both were trained without."""
    tokenizer = Tokenizer.load(DEMO_MODEL)
    text = (DEMO_MODEL / "heldout.txt").read_text("utf-8")[:4000]
    return np.array(tokenizer.encode(text), np.int64)


def transformed(folder: Path, checkpoint: Path, passes: Sequence[Options] = ()) -> ir.Model:
    """The model as `built` lowers it."""
    recipe = load_recipe(str(_recipe(folder, passes, "cuda-sm90")), [f"checkpoint={checkpoint}"])
    model = open_source(recipe).copy()
    PassManager(recipe.make_passes()).run(model)
    return model


def built(
    folder: Path, checkpoint: Path, passes: Sequence[Options] = (), target: str = "cuda-sm90", **sections: object
) -> Artifact:
    """Build the checkpoint with these passes."""
    recipe = _recipe(folder, passes, target, **sections)
    return build(recipe, [f"checkpoint={checkpoint}", *_UNMEASURED], folder / "artifact").artifact


def _recipe(folder: Path, passes: Sequence[Options], target: str, **sections: object) -> Path:
    recipe = folder / "recipe.yaml"
    listed = [*_PREPARED, *passes, "clean-up"]
    engine = {"max_batch_tokens": 128}
    recipe.write_text(json.dumps({"target": target, "passes": listed, "engine": engine, **sections}), "utf-8")
    return recipe
