"""Ops that one launch computes together: norms with residuals, biases, scalars and gates."""

from ingot.artifact.launch_program import Launch
from ingot.pipeline.targets.cuda.lowering import lower_to_launches
from ingot.pipeline.targets.cuda.program_builder import Bucket
from tests.each_case import each_case
from tests.simulators.launch_programs import CHECKPOINTS, CONTEXT, fused, imported


def launches(name: str, rows: int = 8) -> list[str]:
    """Kernels of the second layer of a decode program, in order."""
    lowered = lower_to_launches(fused(imported(CHECKPOINTS / name)), (Bucket.decode(rows, CONTEXT),))
    found = lowered.programs[0].launches
    return [step.kernel.split("-")[0] for step in found if isinstance(step, Launch) and "layers.1." in step.node]


ATTENTION = ["rotary_kv_write", "decode_attention"]


@each_case(
    ("name", "norms"), [("llama", 2), ("qwen2", 2), ("qwen3", 2), ("granite", 2), ("gemma2", 2), ("gemma3_text", 2)]
)
def test_norms_biases_scalars_and_sums_need_no_launches_of_their_own(name: str, norms: int) -> None:
    found = launches(name)
    assert found.count("rms_norm") == norms
    assert [kernel for kernel in found if kernel != "rms_norm"] == [
        *("matmul", *ATTENTION, "matmul"),
        *("matmul", "gated_activation", "matmul"),
    ]


def test_a_sum_and_its_layer_norm_and_the_nodes_of_xielu_are_one_launch_each() -> None:
    assert launches("starcoder2") == [
        *("layer_norm", "matmul", *ATTENTION, "matmul"),
        *("layer_norm", "matmul", "map_rows", "matmul"),
        "combine_rows",  # of the last layer, whose rows are gathered before the last norm
    ]
    found = launches("apertus")
    assert (found.count("map_rows"), found.count("combine_rows")) == (1, 1)


def test_a_normed_branch_and_its_residual_addition_are_one_launch() -> None:
    found = launches("olmo2")
    assert found.count("rms_norm") == 4  # queries, keys, and both sums
    assert "combine_rows" not in found
