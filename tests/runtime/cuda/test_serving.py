"""A server over the CUDA engine, whose device interprets kernels; the demo model's first layer, built as users do."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from ingot.artifact import Artifact, open_artifact
from ingot.artifact.programs.launch_program import CubinFacts, Kernel
from ingot.builder import build
from ingot.pipeline.targets.cuda import writer
from ingot.pipeline.targets.cuda.cubins import Cubin
from ingot.pipeline.targets.cuda.tiles import MatmulShape, Tile, TileTable
from ingot.runtime.cuda.driver import driver
from ingot.sizes import next_power_of_two
from tests.conftest import UNMEASURED
from tests.runtime.cuda.artifacts import described
from tests.runtime.cuda.serving import OVERRIDES, SCENARIOS, Scenario, expected_texts
from tests.simulators.interpreted_device import InterpretedDevice

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings are not installed: pip install '.[cuda]'")


class WideTiles(TileTable):
    """The interpreter takes as long for a small tile as for a large one."""

    def choose(self, shape: MatmulShape) -> Tile:
        return Tile(rows=16, columns=min(2048, next_power_of_two(shape.n)), depth=256)


def as_described(kernels: Mapping[str, Kernel], sm: int, workers: int | None = None) -> dict[str, Cubin]:
    """Compiled kernels of the interpreted device."""
    return {key: Cubin(described(one), CubinFacts(symbol=one.name, shared_bytes=0)) for key, one in kernels.items()}


@pytest.fixture(scope="module")
def artifact(one_layer: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("served") / "artifact"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(writer, "compile_kernels", as_described)
        patched.setattr(writer, "recipe_tiles", lambda recipe, sms: WideTiles(sm=90))
        build(
            "int4-cuda",
            ["target=cuda-sm90", f"checkpoint={one_layer}", *UNMEASURED, *OVERRIDES, "gpu.activations=float32"],
            folder,
        )
    return open_artifact(folder)


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "open_device", lambda: InterpretedDevice(hasty=True))


@pytest.fixture(scope="module")
def expected(artifact: Artifact) -> Mapping[str, str]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(driver, "open_device", lambda: InterpretedDevice(hasty=True))
        return expected_texts(artifact)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_server_gives_the_tokens_of_requests_alone(
    scenario: Scenario, artifact: Artifact, expected: Mapping[str, str], tmp_path: Path
) -> None:
    scenario(artifact, expected, tmp_path)
