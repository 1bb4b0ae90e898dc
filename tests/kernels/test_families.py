"""Every family through its launch program, in the interpreter, against plain onnxruntime in float32.

A program adds in another order than onnxruntime and folds scalars into other operators: 2e-5 of the largest logit.
"""

from pathlib import Path

import numpy as np
import pytest

from ingot.artifact.launch_program import Launch
from ingot.pipeline.checkpoint.families import FAMILIES
from ingot.pipeline.targets.cuda.lowering import lower_to_launches
from ingot.pipeline.targets.cuda.program_builder import Bucket
from tests.kernels.programs import CHECKPOINTS, CONTEXT, exact_logits, fused, imported, logits_by_program, prompts

LIMIT = 2e-5
LONG, SHORT = 10, 3  # prompts; the fixtures' windows are 8 tokens


def folders() -> list[Path]:
    return sorted(path for path in CHECKPOINTS.iterdir() if path.is_dir())


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: folder.name)
def test_logits_equal_onnxruntimes(folder: Path) -> None:
    is_variant = folder.name not in FAMILIES  # of another checkpoint: other tables, windows, biases
    ids = prompts(LONG) if is_variant else prompts(LONG, SHORT)
    model = imported(folder)
    wanted = [exact_logits(model, sequence)[-2:] for sequence in ids]
    for found, exact in zip(logits_by_program(fused(model), ids), wanted, strict=True):
        assert np.abs(found - exact).max() <= LIMIT * np.abs(exact).max()


def launches(name: str, rows: int = 8) -> list[str]:
    """Kernels of the second layer of a decode program, in order."""
    lowered = lower_to_launches(fused(imported(CHECKPOINTS / name)), (Bucket.decode(rows, CONTEXT),))
    found = lowered.programs[0].launches
    return [step.kernel.split("-")[0] for step in found if isinstance(step, Launch) and "layers.1." in step.node]


ATTENTION = ["rotary_kv_write", "decode_attention", "join_chunks"]


@pytest.mark.parametrize(
    ("name", "norms"), [("llama", 2), ("qwen2", 2), ("qwen3", 2), ("granite", 2), ("gemma2", 2), ("gemma3_text", 2)]
)
def test_norms_biases_scalars_and_sums_need_no_launches_of_their_own(name: str, norms: int) -> None:
    found = launches(name)
    assert found.count("rms_norm") == norms
    assert [kernel for kernel in found if kernel != "rms_norm"] == [
        *("matmul", *ATTENTION, "matmul"),
        *("matmul", "gated_activation", "matmul"),
    ]


def test_a_normed_branch_and_its_residual_addition_are_one_launch() -> None:
    found = launches("olmo2")
    assert found.count("rms_norm") == 4  # queries, keys, and both sums
    assert "combine_rows" not in found
