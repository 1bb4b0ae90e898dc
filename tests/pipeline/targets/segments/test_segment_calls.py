"""Whole programs of kernels and segments by the CUDA executor: logits and tokens are onnxruntime's.

Kernels are interpreted; onnxruntime runs the models that TensorRT would get, on the device's memory.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.artifact import Artifact, ArtifactWriter, ModelFacts
from ingot.passes.model_facts import KV, MODEL
from ingot.pipeline.targets.cuda.lowering import LoweredLaunches
from ingot.pipeline.targets.cuda.program_builder import Bucket, Shared
from ingot.pipeline.targets.segments.segment import Segment
from ingot.pipeline.targets.segments.segment_calls import SegmentFile, lower_to_calls
from ingot.pipeline.targets.segments.stages import split_stages
from ingot.pipeline.targets.tensorrt.segment_lowering import is_kernel
from ingot.runtime import Engine, SamplingParams
from ingot.runtime.cuda.driver.device import Device, Stream
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.forward_batch import FloatArray
from ingot.runtime.options import EngineOptions
from tests.conftest import BuildArtifact
from tests.pipeline.targets.program_chain import reference_logits
from tests.pipeline.targets.tensorrt.models import prepared, quantized, segments_of
from tests.runtime.cuda.artifacts import LLAMA, buckets, seal_program
from tests.runtime.cuda.batches import Growing, token_ids
from tests.simulators.interpreted_device import InterpretedDevice
from tests.simulators.interpreted_segments import InterpretedSegments
from tests.tolerances import within

PROMPT = [token_ids(5, 9).tolist()]
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


def executor_of(form: str, folder: Path, checkpoint: str = "llama") -> tuple[CudaExecutor, list[InterpretedSegments]]:
    """The executor of a fixture's program in float32, and what runs its segments."""
    model, opened = prepared(form, checkpoint), list[InterpretedSegments]()
    geometry = KV.of(model)
    shared = Shared("fp32", geometry.model_copy(update={"block_tokens": 4}))
    segments = segments_of(model, "fp32")
    files = [f"program/segment-{number:03}.plan" for number in range(len(segments))]
    calls = [SegmentFile(segment, "tensorrt", file) for segment, file in zip(segments, files, strict=True)]
    given = buckets(decode=(1, 2), ragged=8, sequences=2)
    programs = lower_to_calls(model, split_stages(model.graph, is_kernel), calls, given, shared)
    facts = MODEL.of(model)
    artifact = _sealed(LoweredLaunches(programs, shared), facts, folder, files)

    def open_segments(artifact: Artifact, device: Device, stream: Stream) -> InterpretedSegments:
        assert isinstance(device, InterpretedDevice)
        opened.append(InterpretedSegments(device, dict(zip(files, map(Segment.copied_model, segments), strict=True))))
        return opened[-1]

    return CudaExecutor(artifact, InterpretedDevice(), EngineOptions(kv_blocks=24), open_segments), opened


def _sealed(lowered: LoweredLaunches, facts: ModelFacts, folder: Path, plans: Sequence[str]) -> Artifact:
    with ArtifactWriter(folder) as writer:
        (writer.path / "program").mkdir()
        for plan in plans:
            (writer.path / plan).write_bytes(b"onnxruntime runs the model instead")
        return seal_program(writer, lowered, facts, "tensorrt", "tensorrt")


def logits_of(executor: CudaExecutor, ids: Any) -> FloatArray:
    """Logits of one sequence: a prompt of five tokens, then another token."""
    sequence = Growing([ids], [[3, 1]])
    return np.concatenate([executor.forward(sequence.step([count])).copy() for count in (5, 1)])


@pytest.mark.parametrize(
    ("form", "checkpoint"),
    [("plain", "llama"), ("int4-zero-points", "llama"), ("int8-activations", "llama"), ("plain", "qwen3")],
)
def test_prompts_and_decoded_tokens_have_the_logits_of_the_ir(form: str, checkpoint: str, tmp_path: Path) -> None:
    ids = token_ids(6, vocabulary=96)
    executor, _ = executor_of(form, tmp_path / "artifact", checkpoint)
    found = logits_of(executor, ids)
    executor.close()
    wanted = reference_logits(quantized(form, checkpoint), ids)
    error = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    assert within("segments.activations" if "activations" in form else "parity.float32", error, f"{checkpoint} {form}")


def test_greedy_tokens_are_onnxruntimes(build_unmeasured: BuildArtifact, tmp_path: Path) -> None:
    executor, opened = executor_of("plain", tmp_path / "artifact")
    with Engine(executor, max_sequences=executor.max_sequences) as engine:
        found = engine.generate(PROMPT, PARAMS)[0].token_ids
    with Engine.load(build_unmeasured("fp32-cpu", LLAMA), kv_blocks=16) as engine:
        assert engine.generate(PROMPT, PARAMS)[0].token_ids == found
    assert opened[0].num_runs > 0


def test_buckets_of_equal_rows_share_contexts_and_large_prompts_one_that_no_graph_captures() -> None:
    model = prepared()
    segments = segments_of(model, "fp16")
    calls = [SegmentFile(segment, "tensorrt", segment.name) for segment in segments]
    given = (Bucket.decode(64, 32), *(Bucket.ragged(rows, 32, 64) for rows in (64, 128, 256)))
    stages, shared = split_stages(model.graph, is_kernel), Shared("fp16", KV.of(model))
    programs = lower_to_calls(model, stages, calls, given, shared)
    assert [program.is_capturable for program in programs] == [True, True, False, False]
    decode, short, *large = ({call.context for call in program.segment_calls} for program in programs)
    assert decode == short
    assert large == [{(segment.name,) for segment in segments}] * 2
