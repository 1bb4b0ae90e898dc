"""MXFP4: the numbers of transformers, the logits of the dequantized checkpoint, refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from ingot.errors import CheckpointError
from ingot.passes.weights import float32_values, weight_sites
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.formats.mxfp4 import decode
from ingot.pipeline.model.importer import import_checkpoint
from tests.parity import CHECKPOINTS, LOGITS, compare, load_logits
from tests.reference_runner import ReferenceRunner

SOURCE = CHECKPOINTS / "gpt_oss"
Bytes = NDArray[np.uint8]


def random_pair(rng: np.random.Generator, *sizes: int) -> tuple[Bytes, Bytes]:
    """Blocks [*sizes, 16] and scales [*sizes] whose numbers are about as large as weights."""
    return rng.integers(0, 256, (*sizes, 16), np.uint8), rng.integers(119, 125, sizes, np.uint8)


@pytest.mark.oracle
def test_numbers_are_those_of_transformers() -> None:
    torch: Any = pytest.importorskip("torch")
    theirs: Any = pytest.importorskip("transformers.integrations.mxfp4")
    rng = np.random.default_rng(0)
    blocks, scales = random_pair(rng, 3, 40, 5)
    scales[0] = rng.integers(1, 250, scales[0].shape)  # of any size below infinity
    tensors = torch.from_numpy(blocks), torch.from_numpy(scales)
    expected = theirs.convert_moe_packed_tensors(*tensors, dtype=torch.float32).numpy()  # [experts, in, out]
    for one, two, wanted in zip(blocks, scales, expected, strict=True):
        np.testing.assert_array_equal(decode(one, two).dequantize().T.view(np.int32), wanted.view(np.int32))


def write_both(folder: Path) -> tuple[Path, Path]:
    """A checkpoint of gpt_oss with random experts in MXFP4, and the same dequantized to bfloat16."""
    packed, plain = folder / "packed", folder / "plain"
    for target in (packed, plain):
        shutil.copytree(SOURCE, target)
    tensors = load_file(SOURCE / "model.safetensors")
    unpacked, rng = dict(tensors), np.random.default_rng(1)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks, scales = random_pair(rng, experts, rows, columns // 32)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        weights = np.stack([decode(*pair).dequantize().T for pair in zip(blocks, scales, strict=True)])
        unpacked[name] = np.ascontiguousarray(weights.astype(ml_dtypes.bfloat16))
        np.testing.assert_array_equal(unpacked[name].astype(np.float32), weights)  # bfloat16 holds them exactly
    save_file(tensors, packed / "model.safetensors")
    save_file(unpacked, plain / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return packed, plain


def test_a_checkpoint_has_the_weights_of_the_dequantized_one_and_so_its_logits(tmp_path: Path) -> None:
    tokens, _ = load_logits(SOURCE / LOGITS)
    packed, plain = (import_checkpoint(Checkpoint.open(folder)) for folder in write_both(tmp_path))
    sites = list(zip(weight_sites(packed), weight_sites(plain), strict=True))
    assert sum(one.is_quantized for one, _ in sites) == 2 * 4 * 3  # layers, experts, projections
    for one, other in sites:
        np.testing.assert_array_equal(float32_values(one.operand), float32_values(other.operand))
    logits = [ReferenceRunner(model).run_ragged(tokens) for model in (packed, plain)]
    parity = compare(*logits)  # onnxruntime adds codes in another order than floats
    assert parity.worst <= parity.limit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, name: tensors.pop(f"{name}_scales"), "has no '.*gate_up_proj_scales'"),
        (
            lambda tensors, name: tensors.update({f"{name}_scales": tensors[f"{name}_scales"][:, 1:]}),
            r"must be U8 \[experts, out, blocks, 16\]",
        ),
    ],
)
def test_pairs_that_do_not_fit_together_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    packed, _ = write_both(tmp_path)
    tensors = load_file(packed / "model.safetensors")
    change(tensors, next(name for name in tensors if name.endswith("gate_up_proj_blocks")).removesuffix("_blocks"))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, packed / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(packed)


def test_a_scale_that_is_not_a_number_is_refused_with_the_weights_name(tmp_path: Path) -> None:
    packed, _ = write_both(tmp_path)
    tensors = load_file(packed / "model.safetensors")
    tensors["model.layers.0.mlp.experts.down_proj_scales"][1, 2, 0] = 255
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.1\.down_proj\.weight': 1 of its 64 scales are NaN"):
        import_checkpoint(Checkpoint.open(packed))
