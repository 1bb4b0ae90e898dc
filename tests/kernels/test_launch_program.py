"""What a launch program is: its data, its arena, its pools, what it refuses, and graphs that no pass has tidied."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from ingot.artifact.launch_program import Launch, LaunchProgram, Step
from ingot.errors import PassError
from ingot.pipeline.targets.cuda.arena import least_bytes, lifetimes
from ingot.pipeline.targets.cuda.lowering import lower_to_launches
from ingot.pipeline.targets.cuda.program_builder import Bucket
from tests.kernels.programs import CHECKPOINTS, CONTEXT, exact_logits, fused, imported, logits_by_program, prompts
from tests.simulators.interpreted_kernels import InterpretedModel

LLAMA = CHECKPOINTS / "llama"


class RoundedPool(InterpretedModel):
    """A pool of floats whose every vector is rounded, after each write, to what another precision would hold."""

    precision = "int8"

    def _launch(self, program: LaunchProgram, launch: Step, external: Mapping[str, torch.Tensor]) -> None:
        super()._launch(program, launch, external)
        if isinstance(launch, Launch) and launch.kernel.startswith("rotary_kv_write"):
            vectors = self._pool.reshape(-1, self.kv.head_dim)
            largest = vectors.abs().max(dim=1, keepdim=True).values
            limit = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}[self.precision]
            scale = (largest / limit).to(torch.float16).to(torch.float32)
            scale[scale == 0] = 1.0
            codes = (vectors / scale).clamp(-limit, limit)
            rounded = codes.to(torch.float8_e4m3fn) if self.precision == "fp8" else codes.round()
            vectors.copy_(rounded.to(torch.float32) * scale)


@pytest.mark.parametrize("precision", ["fp8", "int8", "int4"])
def test_a_quantized_pool_gives_the_bits_of_one_with_rounded_vectors(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompts(5)
    model = fused(imported(LLAMA))
    found = logits_by_program(model, ids, precision)[0]
    monkeypatch.setattr(RoundedPool, "precision", precision)
    wanted = logits_by_program(model, ids, runner_class=RoundedPool)[0]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_graph_that_nothing_is_packed_or_fused_in_gives_the_same_logits(name: str) -> None:
    ids = prompts(5)
    model = imported(CHECKPOINTS / name, prepared=("fold-constants", "clean-up"))
    wanted = exact_logits(model, ids[0])[-2:]
    found = logits_by_program(fused(model, passes=("clean-up",)), ids)[0]
    assert np.abs(found - wanted).max() <= 2e-5 * np.abs(wanted).max()


def test_a_program_is_data_and_its_arena_is_close_to_the_bound() -> None:
    lowered = lower_to_launches(fused(imported(LLAMA)), (Bucket.decode(8, CONTEXT),))
    (program,) = lowered.programs
    assert LaunchProgram.model_validate_json(program.model_dump_json()) == program
    sizes = {name: place.bytes for name, place in program.places.items()}
    least = least_bytes(
        lifetimes([launch.buffers for launch in program.launches], sizes)
    )  # but for what the head keeps
    assert least <= program.arena_bytes <= 1.25 * least


def test_an_operator_without_a_kernel_is_refused_by_name() -> None:
    model = fused(imported(LLAMA))
    next(node for node in model.graph if node.op_type == "Sigmoid").op_type = "Erf"
    with pytest.raises(
        PassError, match=r"'layers.0.mlp.sigmoid' \(Erf\) has no CUDA kernel; there are kernels for Add"
    ):
        lower_to_launches(model, (Bucket.decode(4, CONTEXT),))
