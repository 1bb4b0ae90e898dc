"""Every family's launch program, in the interpreter, against plain onnxruntime in float32; ops without a kernel.

A program adds in another order than onnxruntime and folds scalars into other operators: 2e-5 of the largest logit.
"""

import numpy as np
import pytest

from ingot.errors import PassError
from ingot.pipeline.checkpoint.families import FAMILIES
from ingot.pipeline.targets.cuda.lowering import lower_to_launches
from ingot.pipeline.targets.cuda.program_builder import Bucket
from tests.each_case import each_case
from tests.oracle.cases import CASES
from tests.oracle.dense_cases import DENSE_CASES
from tests.oracle.unequal_cases import UNEQUAL_CASES
from tests.simulators.launch_programs import (
    CHECKPOINTS,
    CONTEXT,
    exact_logits,
    fused,
    imported,
    logits_by_program,
    prompts,
)

LIMIT = 2e-5
LONG, SHORT = 10, 3  # prompts; the fixtures' windows are 8 tokens


# Interleaved rope, rope of its own launch, sinks, xIELU, clips, LayerNorm: without a bias, of sums, of heads.
DENSE = (
    *("glm4", "hunyuan_v1_dense", "ministral3", "granite_swa", "apertus", "olmo-clipped", "cohere2", "starcoder2"),
    "phi",
)


UNEQUAL = [case.name for case in UNEQUAL_CASES if case.name != "gemma3n_text"]


@each_case("name", sorted([*(case.name for case in CASES), *DENSE, *UNEQUAL]))
def test_logits_equal_onnxruntimes(name: str) -> None:
    folder = CHECKPOINTS / name
    is_variant = folder.name not in FAMILIES  # of another checkpoint: other tables, windows, biases
    ids = prompts(LONG) if is_variant else prompts(LONG, SHORT)
    model = imported(folder)
    wanted = [exact_logits(model, sequence)[-2:] for sequence in ids]
    for found, exact in zip(logits_by_program(fused(model), ids), wanted, strict=True):
        assert np.abs(found - exact).max() <= LIMIT * np.abs(exact).max()


@each_case("name", [case.name for case in DENSE_CASES if case.name not in DENSE])
def test_other_families_have_a_kernel_for_every_node(name: str) -> None:
    model, bucket = fused(imported(CHECKPOINTS / name)), Bucket.decode(4, CONTEXT)
    assert lower_to_launches(model, (bucket,)).programs


def test_a_clip_to_computed_bounds_is_refused_by_name() -> None:
    model = fused(imported(CHECKPOINTS / "olmo-clipped"))
    clip = next(node for node in model.graph if node.op_type == "Clip")
    clip.replace_input_with(1, clip.inputs[0])
    with pytest.raises(PassError, match=r"q_proj\.clipped' \(Clip\) clips to computed bounds, and the CUDA kernel to"):
        lower_to_launches(model, (Bucket.decode(4, CONTEXT),))


LLAMA = CHECKPOINTS / "llama"


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_graph_without_packing_and_fusions_gives_the_same_logits(name: str) -> None:
    ids = prompts(5)
    model = imported(CHECKPOINTS / name, prepared=("fold-constants", "clean-up"))
    wanted = exact_logits(model, ids[0])[-2:]
    found = logits_by_program(fused(model, passes=("clean-up",)), ids)[0]
    assert np.abs(found - wanted).max() <= 2e-5 * np.abs(wanted).max()


def test_an_operator_without_a_kernel_is_refused_by_name() -> None:
    model = fused(imported(LLAMA))
    next(node for node in model.graph if node.op_type == "Sigmoid").op_type = "Erf"
    with pytest.raises(
        PassError, match=r"'layers.0.mlp.sigmoid' \(Erf\) has no CUDA kernel; there are kernels for Add"
    ):
        lower_to_launches(model, (Bucket.decode(4, CONTEXT),))
