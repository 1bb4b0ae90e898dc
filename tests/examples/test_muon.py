"""Muon's updates are orthogonal, and it lowers a loss faster than their size alone would."""

from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="examples train with torch: pip install --group oracle")

from examples.muon import Muon, orthogonal  # noqa: E402 - it imports torch


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (3, 16, 64)])
def test_the_orthogonal_matrix_has_singular_values_near_1_and_the_same_directions(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    matrices = rng.standard_normal(shape) * np.geomspace(1, 20, shape[-1])
    found = orthogonal(torch.from_numpy(matrices)).numpy()
    left, _, right = np.linalg.svd(matrices, full_matrices=False)
    values = np.diagonal(np.swapaxes(left, -1, -2) @ found @ np.swapaxes(right, -1, -2), axis1=-2, axis2=-1)
    assert 0.6 < values.min() <= values.max() < 1.3


def test_a_stack_of_matrices_moves_as_each_alone() -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(3, 8, 12), torch.randn(3, 8, 12)
    together = torch.nn.Parameter(start.clone())
    apart = [torch.nn.Parameter(matrix.clone()) for matrix in start]
    together.grad = gradient
    for matrix, part in zip(apart, gradient, strict=True):
        matrix.grad = part
    for matrices in ([together], apart):
        optimizer = Muon(matrices, lr=0.1, weight_decay=0.5)
        optimizer.step()
        optimizer.step()
    moved = (together.detach() - start).norm(dim=(-2, -1))
    assert (moved > 0.1).all()
    assert torch.allclose(together.detach(), torch.stack([matrix.detach() for matrix in apart]), atol=1e-2)
