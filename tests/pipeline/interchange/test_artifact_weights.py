"""Weights of an artifact: every family's tensors by name, with the values that onnxruntime computes with."""

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from ingot.artifact import Artifact, SegmentStep
from ingot.artifact.manifest import CPU_ENGINES
from ingot.errors import ArtifactError, UsageError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.sealed import CONFIG, sealed_checkpoint
from ingot.pipeline.interchange.artifact_weights import weights_of_artifact
from ingot.pipeline.interchange.layers import PlainWeight, QuantizedLayer, Weight
from ingot.pipeline.targets.segments import weight_operands
from ingot.pipeline.targets.segments.weight_operands import READERS
from tests.conftest import BuildArtifact
from tests.data_paths import FIXTURES
from tests.each_case import each_case
from tests.oracle.cases import CASES
from tests.sessions import plain_session

FAMILIES = sorted(case.name for case in CASES)
ONE_PLUS = ("gemma2", "gemma3")  # their norms multiply by 1 + w, and the program stores the sum


def floats(weight: Weight) -> NDArray[np.float32]:
    """The weight as float32."""
    if isinstance(weight, QuantizedLayer):
        return weight.read().dequantize()
    return np.asarray(weight.tensor.numpy()).astype(np.float32)


def stored(checkpoint: Checkpoint, name: str) -> NDArray[np.float32]:
    """The checkpoint's tensor as float32."""
    return np.asarray(checkpoint.external(name).numpy()).astype(np.float32)


SCALED_BIAS = "granite-tied-biases"  # its residual multiplier is folded into biases


@each_case(("family", "engine"), [(f, e) for f in FAMILIES for e in CPU_ENGINES if (f, e) != (SCALED_BIAS, "native")])
def test_floats_of_every_family_equal_the_checkpoints(
    family: str, engine: str, build_unmeasured: BuildArtifact
) -> None:
    checkpoint = Checkpoint.open(FIXTURES / "checkpoints" / family)
    artifact = build_unmeasured("fp32-cpu", checkpoint.path, "generate=null", f"cpu.engine={engine}")
    for weight in weights_of_artifact(artifact):
        assert isinstance(weight, PlainWeight)
        original = stored(checkpoint, weight.name)
        if family.startswith(ONE_PLUS) and weight.name.endswith("norm.weight"):
            assert np.array_equal(floats(weight) + np.float32(1), original + np.float32(1))
        else:
            assert np.array_equal(floats(weight), original)
            assert weight.tensor.dtype == checkpoint.external(weight.name).dtype


@each_case(("family", "engine"), [(f, e) for f in FAMILIES for e in CPU_ENGINES if (f, e) != (SCALED_BIAS, "native")])
def test_quantized_layers_of_every_family_have_their_own_names(
    family: str, engine: str, build_unmeasured: BuildArtifact
) -> None:
    checkpoint = Checkpoint.open(FIXTURES / "checkpoints" / family)
    artifact = build_unmeasured("int4-cpu", checkpoint.path, "generate=null", f"cpu.engine={engine}")
    for weight in weights_of_artifact(artifact):
        if isinstance(weight, QuantizedLayer):
            original = stored(checkpoint, weight.name)
            assert np.linalg.norm(floats(weight) - original) < 0.25 * np.linalg.norm(original), weight.name


def test_a_bias_that_a_factor_was_folded_into_is_refused(build_unmeasured: BuildArtifact) -> None:
    checkpoint = FIXTURES / "checkpoints" / SCALED_BIAS
    artifact = build_unmeasured("fp32-cpu", checkpoint, "generate=null", "cpu.engine=native")
    with pytest.raises(UsageError, match=r"o_proj\.bias.*was changed when it was packed; export from the recipe"):
        weights_of_artifact(artifact)


@each_case("packed", ["pack-projections", "clean-up"])
@each_case("bits", [2, 3, 4, 8])
@each_case("symmetric", ["true", "false"])
def test_both_engines_have_the_same_codes(
    packed: str, bits: int, symmetric: str, build_unmeasured: BuildArtifact
) -> None:
    """Whether gate and up projections were packed before they became pairs, or by the lowering."""
    quantize = f"{{quantize-weights: {{bits: {bits}, block_size: 32, symmetric: {symmetric}, scale_dtype: float16}}}}"
    passes = f"passes=[fold-constants, {packed}, {quantize}]"
    llama = FIXTURES / "checkpoints" / "llama"
    ort, native = (
        {
            weight.name: weight
            for weight in weights_of_artifact(build_unmeasured("fp32-cpu", llama, passes, f"cpu.engine={engine}"))
        }
        for engine in CPU_ENGINES
    )
    assert ort.keys() == native.keys()
    for name, weight in ort.items():
        assert np.array_equal(floats(weight), floats(native[name])), name
        assert type(weight) is type(native[name]), name


def matmul_weights(artifact: Artifact) -> dict[str, NDArray[np.float32]]:
    """Node name -> weight [out, in], the result of onnxruntime's MatMulNBits for an identity matrix."""
    found = {}
    for step in artifact.manifest.program.steps:
        if isinstance(step, SegmentStep):
            for node in ir.load(artifact.file(step.file)).graph:
                if node.op_type == "MatMulNBits":
                    found[node.name or ""] = _matmul_weight(node)
    return found


def _matmul_weight(node: ir.Node) -> NDArray[np.float32]:
    columns = node.attributes["K"].as_int()
    identity = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([columns, columns]))
    weights = [
        None if value is None else ir.Value(name=value.name, type=value.type, shape=value.shape)
        for value in node.inputs[1:4]
    ]
    for value, source in zip(weights, node.inputs[1:4], strict=True):
        if value is not None and source is not None and source.const_value is not None:
            value.const_value = ir.Tensor(np.array(source.const_value.numpy()), name=value.name)
    attributes = {name: node.attributes[name].as_int() for name in ("K", "N", "bits", "block_size")}
    single = ir.node("MatMulNBits", [identity, *weights], attributes, domain=node.domain)
    single.outputs[0].name, single.outputs[0].type = "y", identity.type
    stored_values = [value for value in weights if value is not None]
    opsets = {"": 24, node.domain: 1}
    graph = ir.Graph([identity], single.outputs, nodes=[single], initializers=stored_values, opset_imports=opsets)
    session = plain_session(ir.Model(graph, ir_version=11))
    (result,) = session.run(None, {"x": np.eye(columns, dtype=np.float32)})
    return np.ascontiguousarray(result.T)


SCHEMES = [
    (bits, block, symmetric) for bits in (2, 3, 4, 8) for block in (32, '"channel"') for symmetric in ("true", "false")
]


@each_case(("bits", "block", "symmetric"), SCHEMES)
def test_codes_are_the_ones_that_onnxruntime_computes_with(
    bits: int, block: object, symmetric: str, build_unmeasured: BuildArtifact
) -> None:
    scheme = f"bits: {bits}, block_size: {block}, symmetric: {symmetric}, embedding: none, lm_head: none"
    passes = f"passes=[pack-projections, {{quantize-weights: {{{scheme}}}}}]"
    artifact = build_unmeasured("fp32-cpu", FIXTURES / "checkpoints" / "qwen2", passes, "generate=null")
    read = {weight.name: weight for weight in weights_of_artifact(artifact)}
    for node, expected in matmul_weights(artifact).items():
        path, _, leaf = f"model.{node}".rpartition(".")
        parts = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}.get(leaf, [leaf])
        layers = [read[f"{path}.{part}.weight"] for part in parts]
        assert np.array_equal(np.concatenate([floats(layer) for layer in layers]), expected)
        assert all(isinstance(layer, QuantizedLayer) and layer.facts.bits == bits for layer in layers)


@pytest.mark.parametrize("symmetric", ["true", "false"])
def test_integer_matmuls_keep_the_scheme_of_their_inputs(symmetric: str, build_unmeasured: BuildArtifact) -> None:
    scheme = f"bits: 8, block_size: channel, symmetric: {symmetric}, embedding: none, lm_head: none"
    quantize = f"{{quantize-weights: {{{scheme}}}}}"
    source = FIXTURES / "checkpoints" / "qwen2"
    alone = build_unmeasured("fp32-cpu", source, f"passes=[pack-projections, {quantize}]", "generate=null")
    passes = f"passes=[pack-projections, {quantize}, {{quantize-activations: {{mode: dynamic}}}}]"
    both = build_unmeasured("fp32-cpu", source, passes, "generate=null")
    for weight, same in zip(weights_of_artifact(both), weights_of_artifact(alone), strict=True):
        assert np.array_equal(floats(weight), floats(same))
        if isinstance(weight, QuantizedLayer):
            assert weight.activations is not None
            assert weight.activations.words == "int8 dynamic per token"


def test_a_tied_head_that_alone_is_quantized_gets_its_own_name(build_unmeasured: BuildArtifact) -> None:
    passes = "passes=[{quantize-weights: {embedding: none, lm_head: 8}}]"
    source = FIXTURES / "checkpoints" / "llama-tied-biases"
    read = {w.name: w for w in weights_of_artifact(build_unmeasured("fp32-cpu", source, passes, "generate=null"))}
    table, head = read["model.embed_tokens.weight"], read["lm_head.weight"]
    assert isinstance(table, PlainWeight)
    assert isinstance(head, QuantizedLayer)
    assert np.array_equal(floats(table), stored(Checkpoint.open(source), table.name))


def test_an_op_without_a_reader_is_refused(build_unmeasured: BuildArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = build_unmeasured(
        "int4-cpu", FIXTURES / "checkpoints" / "llama", "generate=null", "cpu.engine=onnxruntime"
    )
    key = ("com.microsoft", "MatMulNBits")
    monkeypatch.setattr(weight_operands, "READERS", {op: row for op, row in READERS.items() if op != key})
    with pytest.raises(UsageError, match=r"'layers\.0\.self_attn\.qkv_proj' \(MatMulNBits\) reads 'model\.layers\.0"):
        weights_of_artifact(artifact)


def test_a_config_of_another_shape_is_refused(build_unmeasured: BuildArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = build_unmeasured("fp32-cpu", FIXTURES / "checkpoints" / "llama", "generate=null")
    config = Path(artifact.file(CONFIG)).read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 4')
    sealed = sealed_checkpoint(artifact)
    other = Checkpoint(sealed.path, json.loads(config), sealed.generation_config, sealed.tensors)
    monkeypatch.setattr("ingot.pipeline.interchange.artifact_weights.sealed_checkpoint", lambda artifact: other)
    with pytest.raises(ArtifactError, match=r"the program reads no 'model\.layers\.3\.self_attn\.q_proj\.weight'"):
        weights_of_artifact(artifact)
