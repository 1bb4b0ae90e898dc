"""Runs launch programs in Triton's interpreter, as the CUDA runtime runs their cubins: slowly, and with any type."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray

from ingot.artifact import KVGeometry
from ingot.artifact.launch_program import EXTERNAL, Argument, Launch, LaunchProgram, LibraryMatmul, Step
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from ingot.pipeline.targets.cuda.lowering import Lowered
from ingot.pipeline.targets.cuda.program_builder import Weight
from tests.kernels import torch_types

# bfloat16 is left out: what the interpreter computes in it is not what a card does.
TORCH_TYPES = {name: kind for name, kind in torch_types.TORCH_TYPES.items() if name != "bf16"}
_DOT_TYPES = {"fp32": tl.float32, "fp16": tl.float16}


class InterpretedModel:
    """A lowered model with memory of its own: arena, weights, and a KV pool of so many blocks."""

    def __init__(self, lowered: Lowered, blocks: int) -> None:
        self.programs = {(program.attention, program.rows): program for program in lowered.programs}
        self.kv: KVGeometry = lowered.shared.kv
        self.kernels = lowered.shared.kernels
        self._weights = {name: _tensor(weight) for name, weight in lowered.shared.weights.items()}
        self._arena = torch.zeros(max(program.arena_bytes for program in lowered.programs) // 4, dtype=torch.float32)
        self._pool = torch.zeros(blocks * lowered.shared.kv.block_bytes // 4, dtype=torch.float32)

    def run(
        self, program: LaunchProgram, inputs: Mapping[str, NDArray[Any] | Sequence[int]], vocabulary: int
    ) -> NDArray[np.float32]:
        """logits [rows, vocabulary] of one step; what an input lacks to the bucket is padding."""
        external = {
            name: torch.tensor(array, dtype=TORCH_TYPES[EXTERNAL[name] or ""]) for name, array in inputs.items()
        }
        external["logits"] = torch.full((program.logits_rows * vocabulary,), torch.nan)
        external["tokens"] = torch.full((program.logits_rows,), -1)
        for launch in program.launches:
            self._launch(program, launch, external)
        return external["logits"].reshape(program.logits_rows, vocabulary).numpy()

    def _launch(self, program: LaunchProgram, launch: Step, external: Mapping[str, torch.Tensor]) -> None:
        if isinstance(launch, LibraryMatmul):
            operands = launch.operands.items()
            multiply(launch, {name: self._argument(program, operand, external) for name, operand in operands})
            return
        assert isinstance(launch, Launch), "segments of other engines are not interpreted"
        kernel = self.kernels[launch.kernel]
        module, _, name = SIGNATURES[kernel.name].function.partition(".")
        function = getattr(import_module(f"ingot.kernels.{module}"), name)
        constants = {key: _constant(key, value) for key, value in kernel.constants.items()}
        arguments = [self._argument(program, argument, external) for argument in launch.arguments]
        function[launch.grid](*arguments, **constants)

    def _argument(self, program: LaunchProgram, argument: Argument, external: Mapping[str, torch.Tensor]) -> Any:
        if argument.kind == "number":
            return argument.value
        if argument.kind == "null":
            return torch.zeros(1, dtype=TORCH_TYPES[argument.type])
        dtype = TORCH_TYPES[argument.type]
        if argument.kind == "weight":
            return self._weights[argument.name]
        if argument.name in ("kv_pool", "kv_scales"):
            return self._pool.view(dtype)[argument.offset :]
        if argument.name in external:
            return external[argument.name]
        place = program.places[argument.name]
        part = self._arena[place.offset // 4 : (place.offset + place.bytes + 3) // 4]
        return part.view(dtype)[argument.offset :]


def multiply(product: LibraryMatmul, operands: Mapping[str, torch.Tensor]) -> None:
    """What a library computes, on flat operands: sums in float32, rounded once."""
    x = operands["x"].as_strided((product.rows, product.columns), (product.x_stride, 1)).float()
    weight = operands["weight"].as_strided((product.n, product.columns), (product.columns, 1)).float()
    result = product.alpha * (x @ weight.T)
    if "bias" in operands:
        result += operands["bias"][: product.n].float()
    operands["out"].as_strided((product.rows, product.n), (product.out_stride, 1)).copy_(result)


def _tensor(weight: Weight) -> torch.Tensor:
    values = np.array(weight.make())
    if weight.type == "fp8e4nv":  # which torch does not take from numpy
        return torch.from_numpy(values.view(np.uint8)).view(TORCH_TYPES[weight.type])
    return torch.from_numpy(values).to(TORCH_TYPES[weight.type])


def _constant(name: str, value: Any) -> Any:
    """Constants by name; products are float32, whatever the card would take them in."""
    if name == "UPCAST":
        return True
    return _DOT_TYPES[value] if isinstance(value, str) else value
