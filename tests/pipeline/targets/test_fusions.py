"""Ops that one launch computes together: norms with residuals, biases, scalars and gates."""

from ingot.artifact.programs.launch_program import Launch
from ingot.pipeline.targets.cuda.lowering import lower_to_launches
from ingot.pipeline.targets.cuda.program_builder import Bucket
from ingot.pipeline.targets.cuda.tiles import FEW_ROWS, MatmulShape, Tile, TileTable
from tests.each_case import each_case
from tests.simulators.launch_programs import CHECKPOINTS, CONTEXT, fused, imported


class SplitTiles(TileTable):
    """Splits the sums of all matmuls of few rows in two."""

    def choose(self, shape: MatmulShape) -> Tile:
        tile = super().choose(shape)
        return tile.model_copy(update={"splits": 2, "depth": 16}) if shape.rows <= FEW_ROWS else tile


def launches(name: str, rows: int = 8) -> list[str]:
    """Kernels of the second layer of a decode program, in order."""
    lowered = lower_to_launches(fused(imported(CHECKPOINTS / name)), (Bucket.decode(rows, CONTEXT),))
    found = lowered.programs[0].launches
    return [step.kernel.split("-")[0] for step in found if isinstance(step, Launch) and "layers.1." in step.node]


ATTENTION = ["rotary_kv_write", "decode_attention"]


@each_case(
    ("name", "norms"), [("llama", 2), ("qwen2", 2), ("qwen3", 2), ("granite", 2), ("gemma2", 2), ("gemma3_text", 2)]
)
def test_norms_biases_scalars_sums_and_gates_need_no_launches_of_their_own(name: str, norms: int) -> None:
    found = launches(name)
    assert found.count("rms_norm") == norms
    assert [kernel for kernel in found if kernel != "rms_norm"] == [
        *("matmul", *ATTENTION, "matmul"),
        *("matmul", "matmul"),
    ]


def test_a_sum_and_its_layer_norm_and_the_nodes_of_xielu_are_one_launch_each() -> None:
    assert launches("starcoder2") == [
        *("layer_norm", "matmul", *ATTENTION, "matmul"),
        *("layer_norm", "matmul", "map_rows", "matmul"),
    ]
    found = launches("apertus")
    assert (found.count("map_rows"), found.count("combine_rows")) == (1, 0)


def test_a_split_sum_and_a_matmul_that_a_library_may_compute_leave_the_gate_to_another_launch() -> None:
    lowered = lower_to_launches(
        fused(imported(CHECKPOINTS / "llama")),
        (Bucket.decode(8, CONTEXT), Bucket.ragged(80, CONTEXT, 8)),
        "fp16",
        SplitTiles(sm=90),
    )
    for program in lowered.programs:
        kernels = [lowered.shared.kernels[step.kernel] for step in program.launches if isinstance(step, Launch)]
        gates = [kernel for kernel in kernels if kernel.name == "gated_activation"]
        assert len(gates) == 3  # layers
        assert all(kernel.constants["INTERLEAVED"] is True for kernel in gates)
        assert not any("GATE" in kernel.constants for kernel in kernels)


def test_a_normed_branch_and_its_residual_addition_are_one_launch() -> None:
    found = launches("olmo2")
    assert found.count("rms_norm") == 4  # queries, keys, and both sums
    assert "combine_rows" not in found
