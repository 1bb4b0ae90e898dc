"""Which weights TensorRT takes as they are stored, and what a refusal recommends for the others."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ingot.artifact.programs.launch_program import ActivationType
from ingot.errors import PassError
from ingot.passes.manager import PassManager
from ingot.passes.model_facts import KV, MODEL
from ingot.passes.registry import make_pass
from ingot.pipeline.targets.cuda.program_builder import Bucket, Shared
from ingot.pipeline.targets.cuda.tiles import TileTable
from ingot.pipeline.targets.segments.onnx_files import write_model
from ingot.pipeline.targets.segments.segment_calls import SegmentFile, lower_to_calls
from ingot.pipeline.targets.segments.stages import split_stages
from ingot.pipeline.targets.tensorrt.build_worker import build_plan
from ingot.pipeline.targets.tensorrt.library import load_library
from ingot.pipeline.targets.tensorrt.plan_builder import PlanCache
from ingot.pipeline.targets.tensorrt.plan_report import check_plan
from ingot.pipeline.targets.tensorrt.plan_request import Profile
from ingot.pipeline.targets.tensorrt.plan_settings import PlanSettings
from ingot.pipeline.targets.tensorrt.segment_lowering import is_kernel
from ingot.pipeline.targets.tensorrt.weight_forms import QuantizedOperand, needs_kernel
from ingot.pipeline.targets.tensorrt.writer import ONNX, plan_request
from tests.each_case import each_case
from tests.pipeline.targets.tensorrt.models import Passes, prepared, quantized, segments_of

PROFILES = {"T": (Profile.of(1), Profile(16, 32, 32)), "R": (Profile.of(1),)}


def gemm(codes: ir.TensorProtocol, blocks: int, block: int | None) -> ir.Node:
    """A linear layer over these codes [out, in]."""
    out = int(codes.shape.numpy()[0])
    scale = ir.Tensor(np.ones((out, blocks) if block else (out,), np.float32), name="w.scale")
    inputs = [ir.Value(name=t.name, type=ir.TensorType(t.dtype), const_value=t) for t in (codes, scale)]
    attributes = {"axis": 1, "block_size": block} if block else {"axis": 0}
    weight = ir.node("DequantizeLinear", inputs, attributes, name="w")
    return ir.node("Gemm", [ir.Value(name="x"), weight.outputs[0]], {"transB": 1}, name="y")


def int4(out: int, columns: int) -> ir.TensorProtocol:
    packed = np.zeros(out * columns // 2, np.uint8)
    return ir.PackedTensor(packed, ir.DataType.INT4, shape=ir.Shape([out, columns]), name="w.q")


@each_case(
    ("columns", "block", "expected"),
    [
        (256, 64, 64),
        (256, None, 128),
        (128, None, 64),
        (320, None, 64),
        (320, 128, 64),
        (336, 32, 16),
        (512, 256, 256),
        (256, 256, 128),
        (32, 128, 16),
        (72, 32, None),
        (16, 16, None),
    ],
)
def test_two_blocks_or_more_divide_the_row_and_have_one_scale_each(
    columns: int, block: int | None, expected: int | None
) -> None:
    node = gemm(int4(8, columns), -(-columns // (block or columns)), block)
    operand = QuantizedOperand.of(node)
    assert operand is not None
    assert operand.plan_block == expected
    assert needs_kernel(node) is (expected is None)


def test_finer_blocks_repeat_the_scale() -> None:
    operand = QuantizedOperand.of(gemm(int4(1, 320), 3, 128))
    assert operand is not None
    assert operand.per_block(np.array([[1.0, 2.0, 3.0]]), 64).tolist() == [[1, 1, 2, 2, 3]]
    assert operand.per_block(np.array([7.0]), 64).tolist() == [[7] * 5]


def test_eight_bits_need_a_kernel_in_blocks_and_none_with_a_scale_per_row() -> None:
    codes = ir.Tensor(np.zeros((4, 64), np.int8), name="w.q")
    assert needs_kernel(gemm(codes, 2, 32))
    assert not needs_kernel(gemm(codes, 1, None))
    assert not any(needs_kernel(node) for node in prepared().graph if node.op_type == "Gemm")


def test_float8_in_blocks_is_refused_by_name() -> None:
    dtype = ir.DataType.FLOAT8E4M3FN
    codes = ir.Tensor(np.zeros((4, 64), dtype.numpy()), dtype=dtype, name="w.q")
    with pytest.raises(PassError, match=r"'w.q' is FLOAT8E4M3FN in blocks of 32; TensorRT takes"):
        needs_kernel(gemm(codes, 2, 32))


def test_unsigned_codes_become_signed_by_subtracting_8() -> None:
    packed = np.array([0x80, 0xF7], np.uint8)  # 0, 8, 7, 15
    tensor = ir.PackedTensor(packed, ir.DataType.UINT4, shape=ir.Shape([1, 4]), name="w.q")
    operand = QuantizedOperand.of(gemm(tensor, 1, None))
    assert operand is not None
    assert operand.int4_codes().numpy().astype(np.int8).tolist() == [[-8, 0, -1, 7]]


def test_an_odd_number_of_rows_or_columns_needs_a_kernel_in_every_form() -> None:
    for passes in ((), (("fp8", {"activations": "none"}),), (("quantize-weights", {"block_size": 16}),)):
        assert needs_kernel(linears(31, 64, passes)[0])
        assert needs_kernel(linears(32, 63, passes)[0])
        assert not needs_kernel(linears(32, 64, passes)[0])


sizes = st.one_of(st.integers(1, 20).map(lambda count: 16 * count), st.integers(1, 100))
block_sizes = st.sampled_from((16, 32, 64, 128, 256, "channel"))


@st.composite
def quantizations(draw: st.DrawFn) -> Passes:
    """Every form of a linear layer and its activations, and of the embedding, which a kernel reads."""
    kind = draw(st.sampled_from(("plain", "fp8", 2, 3, 4, 4, 8)))
    if kind == "plain":
        return ()
    if kind == "fp8":
        return (("fp8", {"activations": draw(st.sampled_from(("none", "dynamic")))}),)
    overrides = {name: {"block_size": draw(block_sizes)} for name in ("proj", "embed_tokens")}
    options = {"bits": kind, "symmetric": draw(st.booleans()), "lm_head": "none", "overrides": overrides}
    activations: Passes = (("quantize-activations", {}),) if draw(st.booleans()) else ()
    return (*activations, ("quantize-weights", options))


@given(sizes, sizes, quantizations(), st.sampled_from(("fp16", "bf16")))
@hypothesis_settings(max_examples=25)
def test_every_form_of_every_shape_builds_or_is_refused_with_block_sizes_that_build(
    out: int, columns: int, passes: Passes, compute: ActivationType
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="plans are built by TensorRT-RTX: pip install '.[tensorrt]'")
    waiting: list[tuple[Passes, frozenset[str]]] = [(passes, frozenset())]
    while waiting:  # each refusal is followed by all that it recommends
        tried, changed = waiting.pop()
        try:
            build(linear_model(out, columns, tried), compute)
        except PassError as error:
            weight, instead = recommended(str(error), columns, tried)
            assert weight not in changed
            waiting += [(other, changed | {weight}) for other in instead]


def recommended(message: str, columns: int, passes: Passes) -> tuple[str, list[Passes]]:
    """The weight that a refusal names, and the passes with each of the block sizes that it recommends."""
    found = re.search(
        r"'(\w+)\.weight' has (\d+) columns in blocks of 16, .* set its block_size to (.*) in the", message
    )
    assert found, message
    assert int(found[2]) == columns
    (*activations, (name, options)) = passes
    changed = []
    for size in re.findall(r"\d+|channel", found[3]):
        overrides = {**options["overrides"], found[1]: {"block_size": size if size == "channel" else int(size)}}
        changed.append((*activations, (name, {**options, "overrides": overrides})))
    assert len(changed) > 1
    return found[1], changed


def build(model: ir.Model, compute: ActivationType) -> None:
    """Lower the launches, and build the plans, of a model of one layer."""
    stages, segments = split_stages(model.graph, is_kernel), segments_of(model, compute)
    files = [SegmentFile(segment, "tensorrt", segment.name) for segment in segments]
    shared = Shared.of(compute, KV.of(model), TileTable())
    lower_to_calls(model, stages, files, (Bucket.decode(2, 32),), shared)
    for segment in segments:
        with TemporaryDirectory() as folder:
            write_model(segment.copied_model(), Path(folder) / ONNX)
            settings = PlanSettings(load_library(), (89,), PROFILES, PlanCache(Path(folder)))
            request = plan_request(segment, Path(folder), settings)
            check_plan(bytes(build_plan(settings.library, request)), request, segment.name)


def linears(out: int, columns: int, passes: Passes) -> list[ir.Node]:
    return [node for node in linear_model(out, columns, passes).graph if node.op_type == "Gemm"]


def linear_model(out: int, columns: int, passes: Passes) -> ir.Model:
    """logits = (E[input_ids] @ W^T) @ H^T with W [out, columns] and H [32, out], after the passes."""
    random = np.random.default_rng(1000 * out + columns)
    ids = ir.Value(name="input_ids", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["T"]))
    embedding = stored("embed_tokens.weight", random.standard_normal((8, columns)))
    nodes = [ir.node("Gather", [embedding, ids], name="embed_tokens")]
    weights = [embedding]
    for name, shape in (("proj", (out, columns)), ("lm_head", (32, out))):
        weights.append(stored(f"{name}.weight", random.standard_normal(shape)))
        nodes.append(ir.node("Gemm", [nodes[-1].outputs[0], weights[-1]], {"transB": 1}, name=name))
    for node, width in zip(nodes, (columns, out, 32), strict=True):
        value = node.outputs[0]
        value.name, value.type, value.shape = node.name, ir.TensorType(ir.DataType.FLOAT), ir.Shape(["T", width])
    graph = ir.Graph([ids], nodes[-1].outputs, nodes=nodes, initializers=weights, opset_imports={"": 24}, name="linear")
    model = ir.Model(graph, ir_version=11)
    llama = quantized()
    MODEL.record(model, MODEL.of(llama))
    KV.record(model, KV.of(llama))
    PassManager([make_pass(*entry) for entry in passes]).run(model)
    return model


def stored(name: str, values: NDArray[np.float64]) -> ir.Value:
    tensor = ir.Tensor(values.astype(np.float32), name=name)
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
