"""Stored weights in a launch's operands, as float32."""

import torch

from benchmarks.gpu.proofs.operands import Operands


def dequantized(of: Operands, total: int, rows: torch.Tensor, columns: int, expert: int = 0) -> torch.Tensor:
    """Rows of a 4- or 8-bit weight of `total` rows, [rows, columns] float32; codes are in spans of 64 bytes.

    expert    of stacked weights, whose codes, scales and zero points follow each other
    """
    bits, spans, group = int(of.constants.get("BITS", 4)), of.size("SPANS"), of.size("GROUP")
    packed = of.view("codes", (total, spans, 64), offset=expert * total * spans * 64)[rows]
    codes = _in_order(packed) if bits == 4 else packed
    groups = -(-columns // group)
    first = expert * groups * total
    group_of = torch.arange(columns, device=packed.device) // group
    scales = of.view("scales", (groups, total), offset=first).T[rows][:, group_of].float()
    zero: torch.Tensor | float = 8.0 if bits == 4 else 128.0
    if of.size("HAS_ZERO_POINTS"):
        zero = of.view("zero_points", (groups, total), offset=first).T[rows][:, group_of].float()
    return (codes.reshape(len(rows), -1)[:, :columns].float() - zero) * scales


def _in_order(packed: torch.Tensor) -> torch.Tensor:
    """4-bit codes [rows, spans, 128] in the order of their columns: of thread, word, three bits of the place in it."""
    halves = torch.stack([packed & 15, packed >> 4], dim=-1).reshape(*packed.shape[:2], 4, 4, 2, 2, 2)
    return halves.permute(0, 1, 3, 2, 5, 6, 4).reshape(*packed.shape[:2], 128)


def halves(interleaved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates and ups [rows, n / 2], of which 8 follow each other in turn."""
    gate, up = interleaved.reshape(len(interleaved), interleaved.shape[1] // 16, 2, 8).unbind(2)
    return gate.flatten(1), up.flatten(1)
