"""Programs with matmuls in a library: equal logits, and Ingot's kernel for matmuls that libraries do not support."""

import numpy as np
import pytest

from ingot.artifact.launch_program import LibraryMatmul
from ingot.pipeline.targets.cuda import lower_linear as lower_matmul
from ingot.pipeline.targets.cuda.lowering import Lowered, lower_to_launches
from ingot.pipeline.targets.cuda.program_builder import Bucket
from tests.kernels.programs import (
    CHECKPOINTS,
    CONTEXT,
    Entry,
    exact_logits,
    fused,
    imported,
    logits_by_program,
    prompts,
)
from tests.runtime.cuda.artifacts import LibraryTiles

LIMIT = 2e-5  # of the largest logit: sums in another order
INT4: Entry = ("quantize-weights", {"block_size": 32, "lm_head": "none", "embedding": "none"})


def lowered(name: str, *quantization: Entry, rows: int = 8, activations: str = "fp16") -> Lowered:
    model = fused(imported(CHECKPOINTS / name, *quantization))
    bucket = Bucket.ragged(rows, CONTEXT, 2)
    return lower_to_launches(model, (bucket,), "fp32" if activations == "fp32" else "fp16", LibraryTiles())


def matmuls(found: Lowered) -> tuple[LibraryMatmul, ...]:
    return found.programs[0].library_matmuls


@pytest.mark.parametrize("name", ["qwen2", "granite-tied-biases", "gemma2"])
def test_logits_equal_onnxruntimes(name: str) -> None:
    """Biases, a scaled matmul with its bias scaled, a capped head."""
    ids = prompts(7, 3)
    model = imported(CHECKPOINTS / name)
    wanted = [exact_logits(model, sequence)[-2:] for sequence in ids]
    for found, exact in zip(logits_by_program(fused(model), ids, tiles=LibraryTiles()), wanted, strict=True):
        assert np.abs(found - exact).max() <= LIMIT * np.abs(exact).max()


def test_slices_of_a_dequantized_weight_are_separate_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_matmul, "DEQUANTIZED_FROM", 8)
    monkeypatch.setattr(lower_matmul, "_SLICE_BYTES", 1)
    monkeypatch.setattr(lower_matmul, "_SLICE_STEP", 64)
    model = imported(CHECKPOINTS / "llama", INT4)
    ids = prompts(7, 3)
    wanted = [exact_logits(model, sequence)[-2:] for sequence in ids]
    for found, exact in zip(logits_by_program(fused(model), ids, tiles=LibraryTiles()), wanted, strict=True):
        assert np.abs(found - exact).max() <= LIMIT * np.abs(exact).max()
    slices = [one for one in matmuls(lowered("llama", INT4)) if one.weight.kind == "buffer" and one.out.offset]
    assert {(one.n, one.out.offset, one.out_stride) for one in slices} == {(32, 64, 96)}


def test_every_plain_matmul_runs_in_the_library_and_none_is_split() -> None:
    found = lowered("llama")
    assert not [kernel for kernel in found.shared.kernels.values() if kernel.name == "matmul"]
    head = matmuls(found)[-1]
    assert (head.x.type, head.weight.type, head.out.type, head.out.name) == ("fp16", "fp16", "fp32", "logits")
    assert (head.rows, head.columns, head.x_stride, head.out_stride) == (2, 32, 32, head.n)
    assert all(f"{name}.parts" not in found.programs[0].places for one in matmuls(found) for name in one.buffers)


def test_matmuls_with_a_cap_or_a_bias_of_another_type_use_ingots_kernel() -> None:
    assert "lm_head" not in " ".join(one.node for one in matmuls(lowered("gemma2")))
    assert "matmul" in {kernel.name for kernel in lowered("gemma2").shared.kernels.values()}
