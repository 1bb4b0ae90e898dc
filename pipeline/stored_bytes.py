"""How many bytes of a program each weight takes: its codes, scales and zero points, whatever op reads them."""

from pathlib import Path

import onnx_ir as ir

from ingot.artifact import Program, SegmentStep

_PARTS = (".q.rows", ".q", ".scale.column", ".scale", ".zero_point", ".float32")


def stored_bytes(folder: Path, program: Program) -> dict[str, int]:
    """Weight's name -> bytes, of a program that was written into `folder`. What several nodes read counts once."""
    places: dict[object, tuple[str, int]] = {}
    for step in program.steps:
        if isinstance(step, SegmentStep):
            for name, value in ir.load(folder / step.file).graph.initializers.items():
                tensor = value.const_value
                assert tensor is not None
                place = (tensor.offset, tensor.length) if isinstance(tensor, ir.ExternalTensor) else name
                places.setdefault(place, (_weight_of(name), tensor.nbytes))
    sizes: dict[str, int] = {}
    for weight, num_bytes in places.values():
        sizes[weight] = sizes.get(weight, 0) + num_bytes
    return sizes


def _weight_of(name: str) -> str:
    part = next((part for part in _PARTS if name.endswith(part)), "")
    return name.removesuffix(part)
