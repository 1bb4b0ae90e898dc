"""Float8 codes of NaN are refused: in a checkpoint when it is read; if a pass made them, when the engine is chosen."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx_ir as ir
import pytest

from ingot.builder import build
from ingot.errors import BuildError, CheckpointError, PassError
from ingot.passes.base import Pass, PassKind
from ingot.passes.weights import weight_sites
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from tests.conftest import UNMEASURED
from tests.parity import CHECKPOINTS
from tests.passes.example_passes import install
from tests.pipeline.checkpoint.formats.whole_fixture import LAYER, whole_checkpoint

O_PROJ = "model.layers.1.self_attn.o_proj.weight.q"
NAN_CODES = ((0, 0x7F), (2, 0xFF), (5, 0x7F))  # column of the first row, code


@dataclass(frozen=True)
class DamageFloat8(Pass):
    """Writes codes of NaN into one float8 weight."""

    name: ClassVar[str] = "damage-float8"
    kind: ClassVar[PassKind] = "quantization"
    summary: ClassVar[str] = "Writes codes of NaN."

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        producers = (site.operand.producer() for site in weight_sites(model))
        stored = (node.inputs[0] for node in producers if node is not None)
        codes = next(value for value in stored if value is not None and value.name == O_PROJ)
        assert codes.const_value is not None
        values = codes.const_value.numpy().copy()
        for column, code in NAN_CODES:
            values.view(np.uint8)[0, column] = code
        codes.const_value = ir.Tensor(values, name=codes.name)
        return ir.passes.PassResult(model, modified=True)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Of a build whose passes make codes of NaN."""
    install(monkeypatch, (DamageFloat8.name, f"{__name__}:DamageFloat8"))
    return (f"checkpoint={CHECKPOINTS / 'llama'}", *UNMEASURED, "passes=[fp8, damage-float8, clean-up]")


@pytest.mark.parametrize("engine", ["auto", "native"])
def test_the_build_ends_with_tensor_number_and_what_to_do(
    settings: tuple[str, ...], tmp_path: Path, engine: str
) -> None:
    message = (
        rf"'{O_PROJ}' has 3 NaN among 1,024 float8 codes \(0x7f or 0xff\); the CPU's kernels read finite ones: check "
        r"the checkpoint, leave the weight out of fp8 with exclude, or set cpu.engine: onnxruntime"
    )
    with pytest.raises(PassError, match=message):
        build("fp32-cpu", (*settings, f"cpu.engine={engine}"), tmp_path / "artifact")
    assert not (tmp_path / "artifact").exists()


def test_onnxruntime_makes_logits_of_nan_and_the_artifact_is_not_sealed(
    settings: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(
        BuildError, match=r"not sealed: .* the logit of token 0 is nan; .* check the checkpoint's weights"
    ):
        build("fp32-cpu", (*settings, "cpu.engine=onnxruntime"), tmp_path / "artifact")
    assert not (tmp_path / "artifact").exists()


def test_a_checkpoint_with_codes_of_nan_is_refused_by_auto_too(tmp_path: Path) -> None:
    folder = whole_checkpoint("llmcompressor-fp8", tmp_path / "model")
    name = f"{LAYER}mlp.up_proj.weight"
    stored = Checkpoint.open(folder).encoded[name].parts["weight"]
    with stored.file.open("r+b") as file:
        file.seek(stored.offset + 100)
        file.write(b"\x7f\xff")
    message = rf"'{name}': 2 of its 65536 codes are NaN or infinite; the checkpoint is damaged .* use another one"
    with pytest.raises(CheckpointError, match=message):
        build("fp32-cpu", (f"checkpoint={folder}", *UNMEASURED), tmp_path / "artifact")
