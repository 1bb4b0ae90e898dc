"""Launch programs: their data, arena and KV pools, operators without a kernel, and graphs without fusions."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from ingot.artifact.kv_geometry import KVType
from ingot.artifact.launch_program import LaunchProgram
from ingot.errors import PassError
from ingot.passes.model_facts import KV
from ingot.pipeline.targets.cuda.arena import least_bytes, lifetimes
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from ingot.pipeline.targets.cuda.lowering import lower_to_launches
from ingot.pipeline.targets.cuda.program_builder import Bucket
from ingot.runtime.cuda.device import Bytes, Given
from tests.kernels.programs import CHECKPOINTS, CONTEXT, exact_logits, fused, imported, logits_by_program, prompts
from tests.simulators.interpreted_device import FakeKernel, FakeStream, InterpretedDevice

LLAMA = CHECKPOINTS / "llama"


class RoundedPool(InterpretedDevice):
    """A device whose float KV pool is rounded, after each write, to the values that another precision can store."""

    def __init__(self, precision: str, head_dim: int) -> None:
        super().__init__()
        self.precision, self.head_dim = precision, head_dim

    def bind(
        self, kernel: FakeKernel, grid: tuple[int, int, int], arguments: Sequence[Given], node: str
    ) -> Callable[[FakeStream], None]:
        queue = super().bind(kernel, grid, arguments, node)
        if kernel.name != "rotary_kv_write":
            return queue
        _, address = arguments[SIGNATURES[kernel.name].index("pool")]

        def write_and_round(stream: FakeStream) -> None:
            queue(stream)
            self.queue(stream, lambda: self.round(self.allocation(int(address))))

        return write_and_round

    def round(self, pool: Bytes) -> None:
        """Round every vector of the pool in place."""
        vectors = torch.from_numpy(pool).view(torch.float32).reshape(-1, self.head_dim)
        largest = vectors.abs().max(dim=1, keepdim=True).values
        limit = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}[self.precision]
        scale = (largest / limit).to(torch.float16).to(torch.float32)
        scale[scale == 0] = 1.0
        codes = (vectors / scale).clamp(-limit, limit)
        rounded = codes.to(torch.float8_e4m3fn) if self.precision == "fp8" else codes.round()
        vectors.copy_(rounded.to(torch.float32) * scale)


@pytest.mark.parametrize("precision", ["fp8", "int8", "int4"])
def test_a_quantized_pool_gives_the_bits_of_one_with_rounded_vectors(
    precision: KVType,
) -> None:
    ids = prompts(5)
    model = fused(imported(LLAMA))
    found = logits_by_program(model, ids, precision)[0]
    head_dim = KV.of(model).head_dim
    wanted = logits_by_program(model, ids, device=RoundedPool(precision, head_dim))[0]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_graph_without_packing_and_fusions_gives_the_same_logits(name: str) -> None:
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
    )  # except buffers that the head keeps
    assert least <= program.arena_bytes <= 1.25 * least


def test_an_operator_without_a_kernel_is_refused_by_name() -> None:
    model = fused(imported(LLAMA))
    next(node for node in model.graph if node.op_type == "Sigmoid").op_type = "Erf"
    with pytest.raises(
        PassError, match=r"'layers.0.mlp.sigmoid' \(Erf\) has no CUDA kernel; there are kernels for Add"
    ):
        lower_to_launches(model, (Bucket.decode(4, CONTEXT),))
