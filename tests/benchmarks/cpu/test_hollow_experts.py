"""The hollow mixture of experts is imported as the real one would be."""

from pathlib import Path

from benchmarks.cpu.hollow_experts import measure, write_checkpoint


def test_a_small_one_is_imported(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, layers=2, experts=4)
    found = measure(tmp_path)
    assert found["tensors"] == 3 + 2 * (9 + 3 * 4)
    assert found["nodes"] > 2 * 4 * 6  # of each expert: three matmuls, an activation of two, a multiplication
