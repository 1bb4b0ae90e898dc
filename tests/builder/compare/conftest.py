"""A small comparison that the tests of this folder share: two recipes and an artifact of one checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from ingot.artifact import Artifact
from ingot.builder import build
from ingot.builder.compare.candidates import ComparedSources, Group, read_groups
from ingot.builder.compare.run import Outcome, run_group
from tests.conftest import BuildArtifact

SMALL = (
    "evaluation={text: checkpoint:heldout.txt, tokens: 1024, window_tokens: 128}",
    "latency={concurrency: [1, 2], prompt_tokens: 16, output_tokens: 4, requests: 2, rounds: 2, max_seconds: 10}",
    "memory=null",
)


class Compared(NamedTuple):
    """A group whose candidates were measured, and the folder."""

    group: Group
    outcomes: Sequence[Outcome]
    folder: Path


@pytest.fixture(scope="session")
def compared(two_layers: Path, build_unmeasured: BuildArtifact, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """fp32-cpu, int8-cpu, and an artifact of int4-cpu."""
    artifact = build_unmeasured("int4-cpu", two_layers)
    folder = tmp_path_factory.mktemp("compared")
    sources = ComparedSources(("fp32-cpu", "int8-cpu", str(artifact.path)), (two_layers,), SMALL)
    [group] = read_groups(sources)
    return Compared(group, run_group(group, folder), folder)


@pytest.fixture(scope="session")
def measured_alone(two_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """int8-cpu as `ingot build` seals it, with evidence of its own."""
    folder = tmp_path_factory.mktemp("alone") / "alone"
    return build("int8-cpu", [f"checkpoint={two_layers}", *SMALL], folder).artifact
