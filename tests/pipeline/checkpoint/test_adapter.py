"""LoRA adapters that PEFT saved: merged as PEFT merges them, and refused by name where Ingot cannot."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ingot.artifact.peft import CONFIG, WEIGHTS
from ingot.errors import CheckpointError
from ingot.passes.weights import float32_values, weight_sites
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import ModelSource, import_checkpoint
from tests.data_paths import ROOT

FOLDER = ROOT / "tests" / "fixtures" / "adapters"
CHECKPOINT = FOLDER / "checkpoint"
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
KINDS = ["attention", "patterns", "magnitudes", "replaced"]
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")


def weights_of(model: Any) -> dict[str, Any]:
    """Weights and vectors of a model, by the checkpoint's names."""
    found: dict[str, Any] = {site.weight.name or "": float32_values(site.operand) for site in weight_sites(model)}
    for value in model.graph.initializers.values():
        found.setdefault(value.name or "", np.array(value.const_value.numpy()))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_has_the_weights_of_peft_s_merge(kind: str) -> None:
    base = weights_of(import_checkpoint(Checkpoint.open(CHECKPOINT)))
    found = weights_of(ModelSource.open(CHECKPOINT, adapter=FOLDER / kind).copy())
    expected = load_file(FOLDER / kind / "merged.safetensors")
    assert expected
    for name, values in found.items():
        if name in expected:
            assert np.abs(values - base[name]).max() > 0.01, "the adapter changes it by more than rounding"
            np.testing.assert_allclose(values, expected[name], rtol=0, atol=2e-6)
        else:
            np.testing.assert_array_equal(values, base[name])
    assert expected.keys() <= found.keys()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_sum_is_rounded_once_to_the_checkpoint_s_type(tmp_path: Path, dtype: str) -> None:
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    shutil.copytree(CHECKPOINT, tmp_path / "base")
    weights = {name: values.astype(kind) for name, values in load_file(CHECKPOINT / "model.safetensors").items()}
    save_file(weights, tmp_path / "base" / "model.safetensors")
    found = weights_of(ModelSource.open(tmp_path / "base", adapter=FOLDER / "attention").copy())
    parts = load_file(FOLDER / "attention" / WEIGHTS)
    name = "model.layers.0.self_attn.q_proj.weight"
    exact = weights[name].astype(np.float64) + 3.0 * (  # alpha 12, rank 4
        parts[A.replace("lora_A", "lora_B")].astype(np.float64) @ parts[A].astype(np.float64)
    )
    assert np.abs(found[name] - exact).max() <= np.abs(exact).max() * EPSILON[dtype] / 2 + 1e-7


def test_conv1d_weights_are_stored_transposed(tmp_path: Path) -> None:
    """gpt2's layers are [in, out], and PEFT sets fan_in_fan_out for them."""
    base = ROOT / "tests" / "fixtures" / "checkpoints" / "gpt2"
    stored = load_file(base / "model.safetensors")
    name = next(each for each in stored if each.endswith("attn.c_attn.weight"))
    rows, columns = stored[name].shape
    rng = np.random.default_rng(1)
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((2, rows), (columns, 2)))
    module = name.removesuffix(".weight")
    tensors = {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
    folder = adapter(tmp_path, tensors, r=2, lora_alpha=2, fan_in_fan_out=True)
    checkpoint = Checkpoint.open(base).with_adapter(folder)
    expected = (stored[name].astype(np.float32) + (b @ a).T).astype(stored[name].dtype)
    np.testing.assert_array_equal(checkpoint.external(name).numpy(), expected)


def adapter(folder: Path, tensors: dict[str, Any] | None = None, **config: object) -> Path:
    """A copy of the adapter `attention` with other tensors and keys of its config."""
    copied = folder / "adapter"
    shutil.copytree(FOLDER / "attention", copied)
    if tensors is not None:
        save_file(tensors, copied / WEIGHTS)
    known = json.loads((copied / CONFIG).read_text())
    (copied / CONFIG).write_text(json.dumps({**known, **config}))
    return copied


def other_tensors(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    tensors = load_file(FOLDER / "attention" / WEIGHTS)
    change(tensors)
    return tensors


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"peft_type": "IA3"}, "peft_type is 'IA3'; Ingot reads LORA"),
    "experts": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters is .* merge it with PEFT"),
    "base-changed": ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    "rank": ({"r": 0}, "r is 0; it must be a whole number"),
    "rank-of-another": ({"r": 8}, r"has the shape \[4, 32\], but adapter_config.json .* require \[8, 32\]"),
    "alpha": ({"lora_alpha": None}, "lora_alpha is None"),
    "pattern": ({"alpha_pattern": {"q_(": 3}}, "is not a regular expression"),
    "dora": ({"use_dora": True}, "holds no magnitude of 'model.layers.0.self_attn.q_proj', and use_dora is true"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_config_that_cannot_be_merged_is_refused_by_key_and_value(tmp_path: Path, case: str) -> None:
    config, message = BAD_CONFIGS[case]
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(CHECKPOINT).with_adapter(adapter(tmp_path, **config))


BAD_TENSORS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "none": (lambda tensors: tensors.clear(), "holds no tensor"),
    "half": (lambda tensors: tensors.pop(A), "holds no lora_A of 'model.layers.0.self_attn.q_proj'"),
    "other-model": (
        lambda tensors: tensors.update({name.replace("layers.0", "layers.7"): tensors[name] for name in (A, B)}),
        "changes 'model.layers.7.self_attn.q_proj.weight', which the checkpoint does not have. Did you mean",
    ),
    "integers": (lambda tensors: tensors.update({A: tensors[A].astype(np.int32)}), "is I32; it must be one of"),
    "shape": (lambda tensors: tensors.update({A: tensors[A][:, :16]}), r"has the shape \[4, 16\]"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path, case: str) -> None:
    change, message = BAD_TENSORS[case]
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(CHECKPOINT).with_adapter(adapter(tmp_path, other_tensors(change)))


def test_an_adapter_with_nan_is_refused_when_weights_are_checked(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors[A][1, 2] = np.nan

    source = ModelSource.open(CHECKPOINT, adapter=adapter(tmp_path, other_tensors(spoil)))
    with pytest.raises(CheckpointError, match=r"lora_A.* has 1 NaN"):
        source.check_weights()


def test_a_folder_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"holds no {CONFIG}; an adapter is a folder that PEFT saved"):
        Checkpoint.open(CHECKPOINT).with_adapter(tmp_path)
    copied = adapter(tmp_path)
    (copied / WEIGHTS).rename(copied / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="is a pickle, which Ingot never loads"):
        Checkpoint.open(CHECKPOINT).with_adapter(copied)


def test_the_digest_covers_the_adapter(tmp_path: Path) -> None:
    plain = Checkpoint.open(CHECKPOINT)
    digests = {plain.digest, *(plain.with_adapter(FOLDER / kind).digest for kind in KINDS)}
    assert len(digests) == 1 + len(KINDS)
    moved = shutil.copytree(FOLDER / "attention", tmp_path / "moved")
    assert plain.with_adapter(moved).digest == plain.with_adapter(FOLDER / "attention").digest
