"""Layers are dropped by an influence that a build remembers when it is cut off in its second walk."""

from pathlib import Path
from typing import Any

from ingot.passes.prune_structure import PruneStructure
from tests.pipeline.test_resume import bits, built, journal, kill_at  # noqa: F401


def test_cut_off_in_either_walk_it_ends_in_the_same_bits(tmp_path: Path, kill_at: Any) -> None:  # noqa: F811
    passes = (PruneStructure(layers=1, ffn=0.5),)
    whole = bits(built(passes, None))
    for stage in range(1, 8):  # two layers' influence, then five stages of one layer and the head
        root = tmp_path / str(stage)
        kill_at(passes, journal(root), stage, written=stage % 2 == 0)
        assert bits(built(passes, journal(root))) == whole, stage
