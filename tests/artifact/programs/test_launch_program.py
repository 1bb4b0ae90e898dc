"""A launch program as JSON: a round trip, refusals that name the field, and the facts of its steps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from ingot.artifact import KVGeometry
from ingot.artifact.programs.launch_program import (
    ELEMENT_BYTES,
    EXTERNAL,
    KV_ELEMENTS,
    STORED_TYPES,
    ArenaRange,
    BufferArgument,
    CudaProgram,
    Kernel,
    Launch,
    LaunchProgram,
    LibraryMatmul,
    NumberArgument,
    SegmentCall,
    Step,
    WeightArgument,
    read_cuda_program,
)
from ingot.artifact.safetensors import DTYPE_BYTES
from ingot.errors import ArtifactError

X, Y = BufferArgument(name="x", type="fp16"), BufferArgument(name="logits", type="fp32")
WEIGHT = WeightArgument(name="w", type="fp16")
LAUNCH = Launch(
    kernel="k", grid=(1, 2, 3), arguments=(X, NumberArgument(value=3), NumberArgument(value=0.5), Y), node="head"
)
MATMUL = LibraryMatmul(rows=1, n=4, columns=8, x=X, weight=WEIGHT, out=Y, x_stride=8, out_stride=4, node="m")


def segment(engine: Literal["tensorrt", "onnxruntime"]) -> SegmentCall:
    return SegmentCall(
        engine=engine,
        file="program/segment-000.plan",
        inputs={"a": X, "b": WEIGHT},
        outputs={"y": Y},
        shapes={"a": (1, 8), "b": (4, 8)},
        node="s",
    )


def bucket(*steps: Step) -> LaunchProgram:
    return LaunchProgram(
        rows=8,
        sequences=8,
        logits_rows=8,
        attention="decode",
        tiles=0,
        arena_bytes=256,
        places={"x": ArenaRange(offset=0, bytes=128)},
        launches=steps,
        head_start=0,
        samplers={"greedy": (LAUNCH,)},
    )


def program(*steps: Step) -> CudaProgram:
    return CudaProgram(
        sms=(90,),
        activation_type="fp16",
        kv=KVGeometry(num_layers=1, num_kv_heads=1, head_dim=8, block_tokens=16),
        vocab_size=32,
        context_tokens=33,
        tile_queries=16,
        kernels={"k": Kernel(name="copy", constants={"N": 4}, types=("*fp16",), aligned=(), num_warps=4, num_stages=1)},
        cubins={},
        programs=(bucket(*steps),),
    )


def test_a_program_reads_back_as_it_was_written(tmp_path: Path) -> None:
    made = program(LAUNCH, segment("tensorrt"), MATMUL)
    (tmp_path / "launches.json").write_text(made.model_dump_json())
    assert read_cuda_program(tmp_path / "launches.json") == made
    raw = json.loads((tmp_path / "launches.json").read_text())
    written = raw["programs"][0]
    assert [step["kind"] for step in written["launches"]] == [LAUNCH.kind, "segment", MATMUL.kind]
    assert LaunchProgram.model_fields["samplers"].serialization_alias in written


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(vocab_size=0), "vocab_size: Input should be greater than or equal to 1"),
        (lambda raw: raw.update(sms=[]), "sms: Tuple should have at least 1 item"),
        (lambda raw: raw["programs"][0]["launches"][0].update(kind="jump"), r"programs\.0\.launches\.0: .*'jump'"),
        (lambda raw: raw["programs"][0].update(speed=1), r"programs\.0\.speed: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_field_is_refused_with_its_place(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    raw = program(LAUNCH).model_dump(mode="json")
    change(raw)
    (tmp_path / "launches.json").write_text(json.dumps(raw))
    with pytest.raises(ArtifactError, match=rf"launches\.json: {message}.*; build the artifact again"):
        read_cuda_program(tmp_path / "launches.json")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"none\.json: cannot be read: No such file"):
        read_cuda_program(tmp_path / "none.json")


def test_steps_list_their_buffers_but_not_their_weights() -> None:
    assert LAUNCH.buffers == ("x", "logits")
    assert segment("tensorrt").buffers == ("x", "logits")
    assert MATMUL.buffers == ("x", "logits")
    assert list(MATMUL.operands) == ["x", "weight", "out"]


def test_a_graph_captures_every_step_but_segments_of_onnxruntime() -> None:
    assert bucket(LAUNCH, segment("tensorrt"), MATMUL).is_capturable
    mixed = bucket(LAUNCH, segment("onnxruntime"), MATMUL)
    assert not mixed.is_capturable
    assert (mixed.segment_calls, mixed.library_matmuls) == ((segment("onnxruntime"),), (MATMUL,))


def test_a_bucket_is_named_by_attention_and_rows_and_a_table_covers_the_context() -> None:
    assert bucket().name == "decode-8"
    assert program().table_columns == 3  # 33 tokens in blocks of 16


def test_every_type_has_a_size_and_the_stored_type_has_the_same() -> None:
    assert {kind: DTYPE_BYTES[stored] for kind, stored in STORED_TYPES.items()} == ELEMENT_BYTES
    assert set(KV_ELEMENTS.values()) | {kind for kind in EXTERNAL.values() if kind} <= set(ELEMENT_BYTES)
