"""The demo model on the interpreted device gives onnxruntime's logits and greedy tokens.

`python -m benchmarks.programs.launch_program` does the same with the tiles of a GPU, in every form and with more
tokens. Here tiles are wide: the interpreter takes as long for a small one as for a large one.
"""

from pathlib import Path

from ingot.pipeline.targets.cuda.tiles import MatmulShape, Tile, TileTable
from ingot.sizes import next_power_of_two
from tests.conftest import BuildArtifact
from tests.runtime.cuda.demo_model import TOLERANCES, compare


class WideTiles(TileTable):
    def choose(self, shape: MatmulShape) -> Tile:
        return Tile(rows=16, columns=min(2048, next_power_of_two(shape.n)), depth=256)


def test_greedy_tokens_are_equal_and_logits_close(tmp_path: Path, build_unmeasured: BuildArtifact) -> None:
    compared = compare("int4", "fp32", 3, tmp_path / "launches", build_unmeasured, WideTiles())
    assert compared.found == compared.wanted
    assert compared.logits_error <= TOLERANCES["fp32"]
