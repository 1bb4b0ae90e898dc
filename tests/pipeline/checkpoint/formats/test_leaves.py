"""Every tensor of every format: a wrong dtype, a wrong shape, a missing one and one too many are refused by name.

A layer of each format is written with the dtypes and shapes that the owning package writes (spelled out here, apart
from the tables that are tested), then one tensor is damaged.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import pytest

from ingot.artifact.safetensors import DTYPE_BYTES, read_header
from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.formats.leaves import QUANTIZED_LEAVES
from ingot.pipeline.checkpoint.formats.quantized_folder import LayerProblems, split_tensors
from ingot.pipeline.interchange.lint import lint_checkpoint
from tests.each_case import each_case
from tests.pipeline.tiny_checkpoint import entry, write_raw

OUT, IN, GROUP = 64, 128, 32
GROUPS = IN // GROUP
MODULE = "model.layers.0.mlp.up_proj"
Spec = tuple[str, list[int]]


@dataclass(frozen=True)
class Case:
    """One format: its settings, its tensors, those that may be absent, and dtypes that are right as well."""

    settings: Mapping[str, Any]
    leaves: Mapping[str, Spec]
    optional: Mapping[str, Spec] = field(default_factory=dict)
    floats: tuple[str, ...] = ()
    indices: tuple[str, ...] = ()

    @property
    def tensors(self) -> dict[str, Spec]:
        """All tensors that a layer may have."""
        return {**self.leaves, **self.optional}


def compressed(format_name: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "symmetric": True, "type": "int", **weights}}
    return {"quant_method": "compressed-tensors", "format": format_name, "config_groups": {"group_0": group}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}
GROUPED = {"strategy": "group", "group_size": GROUP}
FLOAT8 = {"num_bits": 8, "type": "float"}
PACKED_LEAVES: Mapping[str, Spec] = {
    "weight_packed": ("I32", [OUT, IN // 8]),
    "weight_scale": ("F32", [OUT, GROUPS]),
    "weight_shape": ("I64", [2]),
}
ZEROS: Mapping[str, Spec] = {"weight_zero_point": ("I32", [OUT // 8, GROUPS])}
ORDER: Mapping[str, Spec] = {"weight_g_idx": ("I32", [IN])}
INPUT_SCALE: Mapping[str, Spec] = {"pre_quant_scale": ("F32", [IN])}

CASES = {
    "gptq": Case(
        GPTQ,
        {
            "qweight": ("I32", [IN // 8, OUT]),
            "qzeros": ("I32", [GROUPS, OUT // 8]),
            "scales": ("F16", [GROUPS, OUT]),
            "g_idx": ("I32", [IN]),
        },
        floats=("scales",),
        indices=("g_idx",),
    ),
    "gptq-3-bits": Case(
        {**GPTQ, "bits": 3, "desc_act": False, "group_size": -1},
        {"qweight": ("I32", [12, OUT]), "qzeros": ("I32", [1, 6]), "scales": ("F16", [1, OUT])},
        {"g_idx": ("I32", [IN])},
        floats=("scales",),
        indices=("g_idx",),
    ),
    "awq": Case(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
        {
            "qweight": ("I32", [IN, OUT // 8]),
            "qzeros": ("I32", [GROUPS, OUT // 8]),
            "scales": ("F16", [GROUPS, OUT]),
        },
        floats=("scales",),
    ),
    "pack-quantized": Case(
        compressed("pack-quantized", **GROUPED),
        PACKED_LEAVES,
        {**ZEROS, **ORDER},
        floats=("weight_scale",),
        indices=("weight_shape", "weight_g_idx"),
    ),
    "pack-quantized, asymmetric": Case(
        compressed("pack-quantized", **{**GROUPED, "symmetric": False}),
        {**PACKED_LEAVES, **ZEROS},
        ORDER,
        floats=("weight_scale",),
        indices=("weight_shape", "weight_g_idx"),
    ),
    "pack-quantized, activation order": Case(
        compressed("pack-quantized", **GROUPED, actorder="group"),
        {**PACKED_LEAVES, **ORDER},
        ZEROS,
        floats=("weight_scale",),
        indices=("weight_shape", "weight_g_idx"),
    ),
    "pack-quantized, channel": Case(
        compressed("pack-quantized", strategy="channel"),
        {**PACKED_LEAVES, "weight_scale": ("F32", [OUT, 1])},
        {"weight_zero_point": ("I32", [OUT // 8, 1])},
        floats=("weight_scale",),
        indices=("weight_shape",),
    ),
    "int-quantized": Case(
        compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False),
        {"weight": ("I8", [OUT, IN]), "weight_scale": ("F32", [OUT, 1]), "weight_zero_point": ("I8", [OUT, 1])},
        floats=("weight_scale",),
    ),
    "float-quantized, tensor": Case(
        compressed("float-quantized", **FLOAT8, strategy="tensor"),
        {"weight": ("F8_E4M3", [OUT, IN]), "weight_scale": ("F32", [1])},
        floats=("weight_scale",),
    ),
    "float-quantized, block": Case(
        compressed("float-quantized", **FLOAT8, strategy="block", block_structure=[48, 32]),
        {"weight": ("F8_E4M3", [OUT, IN]), "weight_scale": ("F32", [2, GROUPS])},
        floats=("weight_scale",),
    ),
    "naive-quantized, int": Case(
        compressed("naive-quantized", num_bits=8, strategy="channel"),
        {"weight": ("I8", [OUT, IN]), "weight_scale": ("F32", [OUT, 1])},
        floats=("weight_scale",),
    ),
    "naive-quantized, float": Case(
        compressed("naive-quantized", **FLOAT8, strategy="channel"),
        {"weight": ("F8_E4M3", [OUT, IN]), "weight_scale": ("F32", [OUT, 1])},
        floats=("weight_scale",),
    ),
    "nvfp4-pack-quantized": Case(
        compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16),
        {
            "weight_packed": ("U8", [OUT, IN // 2]),
            "weight_scale": ("F8_E4M3", [OUT, IN // 16]),
            "weight_global_scale": ("F32", [1]),
        },
        floats=("weight_global_scale",),
    ),
    "mxfp4-pack-quantized": Case(
        compressed("mxfp4-pack-quantized", type="float", strategy="group", group_size=32),
        {"weight_packed": ("U8", [OUT, IN // 2]), "weight_scale": ("U8", [OUT, IN // 32])},
    ),
    "W4A16_AWQ": Case(
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
        {"weight": ("U8", [OUT // 2, IN]), "weight_scale": ("F32", [OUT, GROUPS])},
        {"weight_scale_2": ("F32", []), **INPUT_SCALE},
        floats=("weight_scale", "weight_scale_2", "pre_quant_scale"),
    ),
    "FP8": Case(
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"weight": ("F8_E4M3", [OUT, IN]), "weight_scale": ("F32", [])},
        INPUT_SCALE,
        floats=("weight_scale", "pre_quant_scale"),
    ),
    "FP8_PER_CHANNEL_PER_TOKEN": Case(
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        {"weight": ("F8_E4M3", [OUT, IN]), "weight_scale": ("F32", [OUT])},
        INPUT_SCALE,
        floats=("weight_scale", "pre_quant_scale"),
    ),
    "FP8_PB_WO": Case(
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
        {"weight": ("F8_E4M3", [OUT, IN]), "weight_scale": ("F32", [2, 1, 4, 1])},
        INPUT_SCALE,
        floats=("weight_scale", "pre_quant_scale"),
    ),
    "NVFP4": Case(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {
            "weight": ("U8", [OUT, IN // 2]),
            "weight_scale": ("F8_E4M3", [OUT, IN // 16]),
            "weight_scale_2": ("F32", []),
        },
        INPUT_SCALE,
        floats=("weight_scale_2", "pre_quant_scale"),
    ),
}


def write_layer(folder: Path, leaves: Mapping[str, Spec], modules: Sequence[str] = (MODULE,)) -> Path:
    """Write layers of zeros; weight_shape holds [OUT, IN]."""
    header, data = {}, b""
    for module, leaf, (dtype, shape) in [(module, *pair) for module in modules for pair in leaves.items()]:
        content = bytes(prod(shape) * DTYPE_BYTES[dtype])
        if leaf == "weight_shape" and dtype in ("I32", "I64") and shape == [2]:
            content = b"".join(number.to_bytes(DTYPE_BYTES[dtype], "little") for number in (OUT, IN))
        header[f"{module}.{leaf}"] = entry(dtype, shape, len(data), len(data) + len(content))
        data += content
    return write_raw(folder / "model.safetensors", header, data)


def split(folder: Path, case: Case, leaves: Mapping[str, Spec]) -> tuple[dict[str, Any], dict[str, Any]]:
    return split_tensors(read_header(write_layer(folder, leaves)), case.settings, "config.json")


def refusal(folder: Path, case: Case, leaves: Mapping[str, Spec]) -> str:
    with pytest.raises(LayerProblems) as caught:
        split(folder, case, leaves)
    message = str(caught.value)
    assert message.startswith(f"{folder / 'model.safetensors'}: the quantized layer '{MODULE}': ")
    return message


def attempt(folder: Path, case: Case, leaves: Mapping[str, Spec]) -> str | tuple[int, ...]:
    """The refusal, or the shape of the weight."""
    try:
        _, encoded = split(folder, case, leaves)
    except LayerProblems as error:
        return str(error)
    shape: tuple[int, ...] = encoded[f"{MODULE}.weight"].shape
    return shape


def each_leaf(optional: bool = True) -> list[Any]:
    return [
        pytest.param(case, leaf, id=f"{name}-{leaf}")
        for name, case in CASES.items()
        for leaf in (case.tensors if optional else case.leaves)
    ]


@each_case("name", CASES)
def test_a_layer_as_its_package_writes_it_is_read(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    for leaves in (case.leaves, case.tensors):
        plain, encoded = split(tmp_path, case, leaves)
        assert plain == {}
        assert encoded[f"{MODULE}.weight"].shape == (OUT, IN)
        assert set(encoded[f"{MODULE}.weight"].parts) == set(leaves)


@each_case(("case", "leaf"), each_leaf())
def test_another_dtype_is_refused_by_name(tmp_path: Path, case: Case, leaf: str) -> None:
    right, shape = case.tensors[leaf]
    allowed = {right, *({"F16", "BF16", "F32"} if leaf in case.floats else ())}
    allowed |= {"I32", "I64"} if leaf in case.indices else set()
    for dtype in DTYPE_BYTES:
        leaves = {**case.tensors, leaf: (dtype, shape)}
        if dtype in allowed:
            split(tmp_path, case, leaves)
        else:
            assert f"'{leaf}' is {dtype}; " in refusal(tmp_path, case, leaves)


@each_case(("case", "leaf"), each_leaf(optional=False))
def test_a_missing_tensor_is_refused_by_name(tmp_path: Path, case: Case, leaf: str) -> None:
    leaves = {name: spec for name, spec in case.tensors.items() if name != leaf}
    assert f"has no '{leaf}', which " in refusal(tmp_path, case, leaves)


FREE = ("FP8_PB_WO", "W4A16_AWQ")  # weight_scale's own shape gives the size of their blocks and groups


@each_case(("case", "leaf"), each_leaf())
def test_another_shape_is_refused(tmp_path: Path, case: Case, leaf: str) -> None:
    """Or, if all tensors but one leave it open, it is that of another weight, which tensors.py refuses."""
    dtype, shape = case.tensors[leaf]
    assert f"'{leaf}' has the shape" in refusal(tmp_path, case, {**case.tensors, leaf: (dtype, [*shape, 2, 2])})
    for axis in range(len(shape)):
        for change in (1, -1, -shape[axis]):
            changed = [size + change * (at == axis) for at, size in enumerate(shape)]
            found = attempt(tmp_path, case, {**case.tensors, leaf: (dtype, changed)})
            is_free = case.settings.get("quant_algo") in FREE and leaf == "weight_scale"
            assert "has the shape" in found if isinstance(found, str) else found != (OUT, IN) or is_free


@each_case("name", CASES)
def test_a_tensor_of_another_format_is_refused(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    for leaf in sorted(QUANTIZED_LEAVES - set(case.tensors)):
        if leaf == "weight_zero_point" and case.settings["quant_method"] == "compressed-tensors" and "fp4" not in name:
            continue  # a symmetric layer may store zeros
        if leaf == "weight_g_idx" and name.startswith("pack"):
            continue
        if leaf == "g_idx" and name.startswith("gptq"):
            continue
        assert f"has a '{leaf}', which " in refusal(tmp_path, case, {**case.tensors, leaf: ("I32", [4])})


@each_case("name", CASES)
def test_a_lone_tensor_is_not_taken_for_a_plain_one(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    for leaf, spec in case.tensors.items():
        if leaf != "weight":
            assert "has no '" in refusal(tmp_path, case, {leaf: spec})


def test_lint_lists_every_layer_and_a_build_the_first(tmp_path: Path) -> None:
    case = CASES["awq"]
    modules = (MODULE, MODULE.replace("layers.0", "layers.1"))
    write_layer(tmp_path, {**case.leaves, "qweight": ("I8", case.leaves["qweight"][1])}, modules)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": case.settings}))
    findings = lint_checkpoint(tmp_path)
    assert [finding.where for finding in findings] == list(modules)
    assert all("'qweight' is I8; awq stores it as I32" in finding.message for finding in findings)
    with pytest.raises(CheckpointError, match=r"'qweight' is I8.*; 1 more layers have problems"):
        Checkpoint.open(tmp_path)


def test_quantized_tensors_without_a_description_are_refused(tmp_path: Path) -> None:
    write_layer(tmp_path, CASES["awq"].leaves)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"'.*qweight' belongs to a quantized layer, but .* has no quantiz"):
        Checkpoint.open(tmp_path)


def test_zero_points_of_float_codes_must_be_zero(tmp_path: Path) -> None:
    case = CASES["float-quantized, tensor"]
    leaves = {**case.leaves, "weight_zero_point": ("F8_E4M3", [1])}
    _, encoded = split(tmp_path, case, leaves)
    encoded[f"{MODULE}.weight"].read()
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(CheckpointError, match="fp8 codes have no zero points"):
        encoded[f"{MODULE}.weight"].read()
