"""Times of kernels on a fake GPU."""

from ingot.artifact.programs.launch_program import Kernel


def wide(kernel: Kernel, grid: tuple[int, int, int]) -> float:
    """Tiles of 128 columns in two split-K parts are fastest; large tiles of many rows, too."""
    parts = abs(int(kernel.constants["SPLITS"]) - 2)
    return 1e-6 * (1 + parts + abs(int(kernel.constants["TILE"]) - 128) / 64 + kernel.num_warps / 64)
