"""Checkpoints of other packages survive every format that can hold them, and back, without a changed value."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ingot.artifact.safetensors import read_header
from ingot.errors import BuildError, UsageError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.interchange import transcode as module
from ingot.pipeline.interchange.formats import CHECKPOINT_FORMATS
from ingot.pipeline.interchange.layers import stored_tensor
from ingot.pipeline.interchange.transcode import Proof, transcode
from tests.data_paths import ROOT, shared_data
from tests.each_case import each_case
from tests.pipeline.checkpoint.formats.tiny_model import tiny_checkpoint
from tests.pipeline.checkpoint.formats.whole_fixture import FIXTURES, LAYER, MODULES, whole_checkpoint
from tests.pipeline.tiny_checkpoint import edit_json, edit_tensors

GPTQ = ("gptq", "gptq-v1", "gptq-v2")
ALL = CHECKPOINT_FORMATS
FLOAT_SCALES = ("compressed-tensors", "safetensors")
# fixture -> the formats that hold it
HELD = {
    "autoawq-gemm-w4-asym": ALL,
    "autogptq-w3-asym": ALL,
    "autogptq-w4-asym": ALL,
    "autogptq-w4-sym": ALL,
    "autogptq-w4-sym-descact": (*GPTQ, *FLOAT_SCALES),
    "gguf-Q4_0": ALL,
    "gguf-Q4_1": ("gguf", "safetensors"),
    "gguf-Q8_0": (*GPTQ, "compressed-tensors", "gguf", "safetensors"),
    "gguf-llamacpp-Q3_K_M": ("gguf", "safetensors"),
    "gguf-llamacpp-Q4_K_M": ("gguf", "safetensors"),
    "gguf-llamacpp-Q6_K": ("gguf", *FLOAT_SCALES),
    "gptqmodel-awq_gemm-w4-asym": ALL,
    "gptqmodel-gptq_v1-w4-sym": ALL,
    "gptqmodel-gptq_v2-w3-asym": ALL,
    "llmcompressor-fp8": FLOAT_SCALES,
    "llmcompressor-fp8-dynamic": FLOAT_SCALES,
    "llmcompressor-fp8-kv": FLOAT_SCALES,
    "llmcompressor-gptq-w4-asym": FLOAT_SCALES,
    "llmcompressor-gptq-w4-sym": FLOAT_SCALES,
    "llmcompressor-mxfp4a16": (*GPTQ, "gguf", *FLOAT_SCALES),
    "llmcompressor-nvfp4a16": FLOAT_SCALES,
    "llmcompressor-w8a16": FLOAT_SCALES,
    "llmcompressor-w8a8-int8": FLOAT_SCALES,
}
ORDER = "has 4 bits symmetric in blocks of 128 in activation order"
MINIMA = "has 4 bits with minima in blocks of 32: its minima are not whole multiples of its scales"
FP8 = r"has fp8 per channel: its codes are floats \(fp8\)"
SCALES = "stores scales as float16, and those of model.layers.0.self_attn.q_proj "
NOT_FOUR = "awq holds only 4 bits, but model.layers.0.self_attn.q_proj has "
# fixture -> what a refusal says, unless a format has its own reason
REASONS = {
    "autogptq-w4-sym-descact": ORDER,
    "gguf-Q4_1": MINIMA,
    "gguf-llamacpp-Q3_K_M": MINIMA,
    "gguf-llamacpp-Q4_K_M": MINIMA,
    "gguf-llamacpp-Q6_K": SCALES,
    "llmcompressor-fp8": FP8,
    "llmcompressor-fp8-dynamic": FP8,
    "llmcompressor-fp8-kv": FP8,
    "llmcompressor-gptq-w4-asym": SCALES,
    "llmcompressor-gptq-w4-sym": SCALES,
    "llmcompressor-nvfp4a16": SCALES,
    "llmcompressor-w8a16": SCALES,
    "llmcompressor-w8a8-int8": SCALES,
}
OWN_REASONS = {
    ("gguf-Q8_0", "awq"): f"{NOT_FOUR}8 bits symmetric in blocks of 32",
    ("gguf-llamacpp-Q6_K", "awq"): f"{NOT_FOUR}6 bits symmetric in blocks of 16",
    ("llmcompressor-mxfp4a16", "awq"): f"{NOT_FOUR}fp4 in blocks of 32",
    ("llmcompressor-nvfp4a16", "awq"): f"{NOT_FOUR}fp4 in blocks of 16",
    ("llmcompressor-nvfp4a16", "gguf"): "all in whole blocks of 32, but .* has fp4 in blocks of 16",
    ("llmcompressor-w8a16", "awq"): f"{NOT_FOUR}8 bits symmetric in blocks of 128",
    ("llmcompressor-w8a8-int8", "awq"): f"{NOT_FOUR}8 bits symmetric per channel",
    ("llmcompressor-fp8", "gguf"): r"fp8 per channel does not fit: its codes are floats \(fp8\)",
    ("llmcompressor-fp8-dynamic", "gguf"): r"fp8 per channel does not fit: its codes are floats \(fp8\)",
    ("llmcompressor-fp8-kv", "gguf"): r"fp8 per channel does not fit: its codes are floats \(fp8\)",
}
PAIRS = [(name, target) for name in FIXTURES for target in CHECKPOINT_FORMATS]


def native(name: str) -> str:
    """The format that a fixture comes in."""
    if "awq" in name:
        return "awq"
    return {"gguf": "gguf", "llmcompressor": "compressed-tensors"}.get(name.partition("-")[0], "gptq")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every fixture as a whole checkpoint."""
    shared_data("golden/quantized")
    return {name: whole_checkpoint(name, tmp_path_factory.mktemp("source") / name) for name in FIXTURES}


@each_case(("name", "target"), [pair for pair in PAIRS if pair[1] in HELD[pair[0]]])
def test_a_checkpoint_survives_a_format_that_holds_it(
    name: str, target: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    there = transcode(sources[name], tmp_path / "there", target)
    assert there.proof.equal
    assert (there.proof.largest_difference, there.proof.changed_tensors, there.proof.tensors) == (0, 0, 12)
    if target != "safetensors" and (name, native(name)) != ("gguf-llamacpp-Q6_K", "gguf"):  # K-quants are read alone
        back = transcode(there.folder, tmp_path / "back", native(name))
        assert back.proof.written_digest == there.proof.source_digest


@each_case(("name", "target"), [pair for pair in PAIRS if pair[1] not in HELD[pair[0]]])
def test_a_refusal_gives_the_reason_and_the_formats_that_hold_the_checkpoint(
    name: str, target: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=OWN_REASONS.get((name, target)) or REASONS[name]) as refusal:
        transcode(sources[name], tmp_path / "out", target)
    able = str(refusal.value).partition("Formats that hold this checkpoint exactly: ")[2]
    assert set(able.split(", ")) == set(HELD[name])
    assert list(tmp_path.iterdir()) == []


@each_case("name", [name for name in FIXTURES if not name.startswith("gguf")])
def test_a_checkpoint_in_its_own_format_keeps_the_packages_tensors(
    name: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    own = {"gptq": "gptq-v2" if "v2" in name else "gptq-v1"}.get(native(name), native(name))
    folder = transcode(sources[name], tmp_path / "out", own).folder
    before, after = (read_header(path / "model.safetensors") for path in (sources[name], folder))
    assert set(after) == {key for key in before if not key.endswith("_proj.bias")}
    for key, tensor in after.items():
        here, there = np.asarray(stored_tensor(before[key]).numpy()), np.asarray(stored_tensor(tensor).numpy())
        kept = here.astype(np.float16) if key.endswith(".scales") else here  # gptqmodel's bfloat16
        assert np.array_equal(kept.reshape(there.shape).view(np.uint8), there.view(np.uint8)), key


def test_changes_of_width_and_group_size_are_noted(sources: dict[str, Path], tmp_path: Path) -> None:
    first = f"7 layers, {LAYER}{next(iter(MODULES))} the first"
    three = transcode(sources["autogptq-w3-asym"], tmp_path / "three", "awq")
    assert three.notes == [f"3 bits are stored in codes of 4: {first}"]
    assert three.left_out == [f"7 biases of zeros, {LAYER}mlp.down_proj.bias the first"]
    wide = transcode(sources["autogptq-w4-sym"], tmp_path / "wide", "gguf")
    assert wide.notes == [f"scales of groups of 128 repeat for blocks of 32: {first}"]


def test_left_out_scales_are_listed(sources: dict[str, Path], tmp_path: Path) -> None:
    outcome = transcode(sources["llmcompressor-fp8-kv"], tmp_path / "out", "safetensors")
    assert outcome.left_out == [f"2 scales of a quantized KV cache, {LAYER}self_attn.k_scale the first"]
    assert outcome.notes == ["quantized inputs (fp8 static per tensor) are left out: safetensors holds only weights"]


def test_lossy_rounding_is_measured(sources: dict[str, Path], tmp_path: Path) -> None:
    source = sources["llmcompressor-gptq-w4-sym"]
    outcome = transcode(source, tmp_path / "out", "gptq", lossy=True)
    weights, again = (Checkpoint.open(path).encoded for path in (source, outcome.folder))
    largest = max(float(np.abs(weights[name].dequantize() - again[name].dequantize()).max()) for name in weights)
    assert not outcome.proof.equal
    assert outcome.proof.largest_difference == largest > 0
    assert outcome.proof.changed_tensors == 7


def test_tensors_of_an_unknown_family_are_copied_by_name(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    edit_json(source / "config.json", {"model_type": "hyena"})
    edit_tensors(source, {"model.layers.0.filter.taps": np.arange(5, dtype=np.int64)})
    outcome = transcode(source, tmp_path / "out", "safetensors")
    assert outcome.proof.equal
    assert load_file(outcome.folder / "model.safetensors")["model.layers.0.filter.taps"].tolist() == [0, 1, 2, 3, 4]


def test_a_failed_proof_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any) -> Proof:
        return Proof(1, 1, 0.5, "model.norm.weight", 1, "a", "b")

    monkeypatch.setattr(module, "prove", wrong)
    with pytest.raises(BuildError, match=r"model\.norm\.weight reads back 0\.5 away"):
        transcode(tiny_checkpoint(tmp_path / "model"), tmp_path / "out", "safetensors")
    assert not (tmp_path / "out").exists()


def test_unknown_names_are_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown format 'gguff'. Did you mean 'gguf'\?"):
        transcode(tmp_path, tmp_path / "out", "gguff")
    with pytest.raises(UsageError, match=r"--dtype: unknown type 'float64'"):
        transcode(tmp_path, tmp_path / "out", "safetensors", dtype="float64")


def test_the_documented_table_is_the_tested_one() -> None:
    text = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    lines = text.partition("| source | gptq |")[2].partition("\n\n")[0].splitlines()
    columns = ["gptq", *(cell.strip() for cell in lines[0].split("|") if cell.strip())]
    documented = {}
    for line in lines[2:]:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        documented[name] = {column for column, cell in zip(columns, cells, strict=True) if cell == "yes"}
    assert documented == {name: set(held) & set(columns) for name, held in HELD.items()}
