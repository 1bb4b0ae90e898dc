"""Whole programs with segments in onnxruntime: its CPU provider replaces CUDA's, kernels are interpreted."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime  # type: ignore[import-untyped]
import pytest

from ingot.artifact import Artifact, ArtifactWriter
from ingot.artifact.programs.launch_checks import read_launches
from ingot.artifact.programs.launch_program import SegmentCall
from ingot.errors import EngineError
from ingot.passes.model_facts import KV, MODEL
from ingot.pipeline.targets.cuda.tiles import TileTable
from ingot.pipeline.targets.ort_cuda.writer import lower_with_segments
from ingot.runtime import Engine, SamplingParams
from ingot.runtime.cpu.executor import OnnxRuntimeExecutor
from ingot.runtime.cuda.driver.device import Device, Queue, Stream
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.cuda.ort_segments import CUDA, OrtSegments, Provider, open_segments
from ingot.runtime.forward_batch import FloatArray, Int64Array
from ingot.runtime.options import EngineOptions
from ingot.version import install_command
from tests.pipeline.targets.ort_cuda.models import prepared
from tests.pipeline.targets.program_chain import reference_logits
from tests.pipeline.targets.tensorrt.models import quantized
from tests.runtime.cuda.artifacts import buckets, seal_program
from tests.runtime.cuda.batches import Growing, token_ids, whole_logits
from tests.simulators.interpreted_device import InterpretedDevice
from tests.tolerances import within

CPU = Provider("CPUExecutionProvider", "cpu", lambda stream: {})
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)
PROMPTS = [token_ids(count, seed).tolist() for count, seed in ((5, 9), (3, 4))]


class HostDevice(InterpretedDevice):
    """A device that records allocations and the work that others queue, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def allocate(self, size: int, what: str) -> int:
        self.log.append(what)
        return super().allocate(size, what)

    def queue_named(self, stream: Stream, what: str, work: Callable[[], None]) -> None:
        self.log.append(what)
        self.queue(stream, work)


class HostSegments(OrtSegments):
    """Segments that run when the interpreted stream reaches them."""

    def __init__(self, artifact: Artifact, device: HostDevice, stream: Stream) -> None:
        super().__init__(artifact, stream, CPU)
        self._device = device
        self.num_calls = 0

    def __call__(self, call: SegmentCall, addresses: Mapping[str, int]) -> Queue:
        self.num_calls += 1
        run = super().__call__(call, addresses)
        return lambda stream: self._device.queue_named(stream, call.file, lambda: run(stream))


def open_on_host(artifact: Artifact, device: Device, stream: Stream) -> HostSegments:
    assert isinstance(device, HostDevice)
    return HostSegments(artifact, device, stream)


def written(model: ir.Model, folder: Path) -> Artifact:
    """The artifact of a prepared model in float32, with blocks of 4 tokens and small buckets."""
    geometry = KV.of(model)
    KV.record(model, geometry.model_copy(update={"block_tokens": 4}))
    facts = MODEL.of(model)
    with ArtifactWriter(folder) as writer:
        given = buckets(decode=(1, 2), ragged=8, sequences=2)
        lowered = lower_with_segments(model, writer.path, given, "fp32", TileTable())
        return seal_program(writer, lowered, facts, "ort-cuda", "onnxruntime-cuda")


def executor_of(artifact: Artifact, device: HostDevice | None = None) -> CudaExecutor:
    return CudaExecutor(artifact, device or HostDevice(), EngineOptions(kv_blocks=24), open_on_host)


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return written(prepared("plain", str(checkpoint)), tmp_path_factory.mktemp("segments") / "artifact")


def logits_of(executor: CudaExecutor, ids: Int64Array) -> FloatArray:
    """Logits of one sequence: a prompt of five tokens, then another token."""
    sequence = Growing([ids], [[3, 1]])
    return np.concatenate([executor.forward(sequence.step([count])).copy() for count in (5, 1)])


def error_of(found: FloatArray, wanted: FloatArray) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def test_prompts_and_decoded_tokens_have_the_cpu_engines_logits(artifact: Artifact, reference: Artifact) -> None:
    ids = token_ids(6)
    executor, engine = executor_of(artifact), OnnxRuntimeExecutor(reference, num_blocks=4)
    found = logits_of(executor, ids)
    assert within("parity.float32", error_of(found, whole_logits(engine, ids)), "llama")
    executor.close()
    engine.close()


@pytest.mark.parametrize(("form", "checkpoint"), [("int4-zero-points", "llama"), ("int8", "gemma2")])
def test_other_families_and_quantized_weights_have_the_logits_of_the_ir(
    form: str, checkpoint: str, tmp_path: Path
) -> None:
    ids = token_ids(6, vocabulary=96)
    executor = executor_of(written(prepared(form, checkpoint), tmp_path / "artifact"))
    found = logits_of(executor, ids)
    executor.close()
    wanted = reference_logits(quantized(form, checkpoint), ids)
    assert within("parity.float32", error_of(found, wanted), f"{checkpoint} {form}")


def test_greedy_tokens_of_several_requests_are_the_cpu_engines(artifact: Artifact, reference: Artifact) -> None:
    executor = executor_of(artifact)
    with Engine(executor, max_sequences=executor.max_sequences) as engine:
        found = [one.token_ids for one in engine.generate(PROMPTS, PARAMS)]
    with Engine.load(reference, kv_blocks=16) as engine:
        assert [one.token_ids for one in engine.generate(PROMPTS, PARAMS)] == found


def test_nothing_is_captured_and_every_call_is_bound_once(artifact: Artifact) -> None:
    device = HostDevice()
    executor = executor_of(artifact, device)
    segments = executor._loaded.segments
    assert isinstance(segments, HostSegments)
    bound = segments.num_calls
    executor.warm_up()
    logits_of(executor, token_ids(6))
    assert device.num_captures == 0
    assert segments.num_calls == bound
    executor.close()


def test_segments_run_once_before_the_pool_takes_the_remaining_memory(artifact: Artifact) -> None:
    device = HostDevice()
    executor_of(artifact, device).close()
    pool = next(number for number, what in enumerate(device.log) if what.startswith("a KV pool"))
    runs = [number for number, what in enumerate(device.log) if what.endswith(".onnx")]
    assert len(runs) == 3 * 3  # of every bucket: before attention, after it, the head
    assert max(runs) < pool


@pytest.mark.skipif(CUDA.name in onnxruntime.get_available_providers(), reason="onnxruntime-gpu is installed")
def test_without_the_cuda_provider_the_error_says_what_to_install(artifact: Artifact) -> None:
    device = HostDevice()
    with pytest.raises(EngineError, match=r"need onnxruntime's CUDAExecutionProvider, and the onnxruntime .* has"):
        CudaExecutor(artifact, device, EngineOptions(kv_blocks=4), open_segments)
    assert device.closed
    with pytest.raises(EngineError, match=re.escape(install_command("ort-cuda"))):
        OrtSegments(artifact, None)


class _Unloaded:
    """A session that onnxruntime made without the requested provider."""

    def __init__(self, *given: object, **options: object) -> None:
        pass

    def get_providers(self) -> list[str]:
        return ["CPUExecutionProvider"]


def test_a_provider_that_does_not_load_is_an_error_with_its_reason(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA.name, CPU.name])
    monkeypatch.setattr(onnxruntime, "InferenceSession", _Unloaded)
    segments = OrtSegments(artifact, 7)
    with pytest.raises(EngineError, match=r"cannot load its CUDAExecutionProvider: .*libonnxruntime_providers.*CUDA"):
        segments(first_call(artifact), {})


def test_nodes_that_the_provider_cannot_run_are_named(artifact: Artifact) -> None:
    segments = OrtSegments(artifact, None, Provider("AzureExecutionProvider", "cpu", lambda stream: {}))
    with pytest.raises(
        EngineError, match=r"segment-000.onnx: onnxruntime's AzureExecutionProvider has no kernel for \S+ \(Gather\)"
    ):
        segments(first_call(artifact), {})


def test_files_that_are_broken_or_of_another_program_are_refused(artifact: Artifact, tmp_path: Path) -> None:
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "segment-000.onnx").write_bytes(b"no model")
    call = first_call(artifact)
    with pytest.raises(EngineError, match=r"segment-000.onnx: onnxruntime cannot load this segment: "):
        OrtSegments(Artifact(tmp_path, artifact.manifest), None, CPU)(call, {})
    other = call.model_copy(update={"outputs": {"z": next(iter(call.outputs.values()))}})
    with pytest.raises(EngineError, match=r"makes \['y0', 'y1'\], but the program gives .* and takes \['z'\]; build"):
        OrtSegments(artifact, None, CPU)(other, {})


def first_call(artifact: Artifact) -> SegmentCall:
    return read_launches(artifact).programs[0].segment_calls[0]
