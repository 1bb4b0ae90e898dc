"""Programs with matmuls in a library: logits, graphs, and when the executor opens the library."""

import sys
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ingot.artifact import Artifact
from ingot.artifact.programs.launch_checks import read_launches
from ingot.artifact.programs.launch_program import LibraryMatmul
from ingot.cli.main import run
from ingot.errors import EngineError
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES
from ingot.pipeline.targets.cuda.program_builder import Bucket
from ingot.pipeline.targets.cuda.tiles import FEW_ROWS, TileTable
from ingot.runtime import Engine, SamplingParams
from ingot.runtime.cpu.executor import OnnxRuntimeExecutor
from ingot.runtime.cuda import library_matmuls
from ingot.runtime.cuda.cublaslt import CublasLt
from ingot.runtime.cuda.driver.device import Device, Queue, Stream
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.cuda.programs import MatmulBinder, OpenMatmuls
from ingot.runtime.options import EngineOptions
from tests.runtime.cuda.artifacts import CONTEXT, LibraryTiles, buckets, model_of, write_artifact
from tests.runtime.cuda.batches import Growing, token_ids, whole_logits
from tests.simulators.cublaslt_in_numpy import Numpy
from tests.simulators.interpreted_device import InterpretedDevice, InterpretedMatmuls
from tests.simulators.launch_programs import CHECKPOINTS, Entry, fused, imported

IDS = token_ids(6)
OPTIONS = EngineOptions(kv_blocks=24)


class QueuedNumpy(Numpy):
    """Computes when the stream reaches the call."""

    def __init__(self, device: InterpretedDevice) -> None:
        super().__init__()
        self._device = device

    def multiply(self, *given: int) -> None:
        self._device.queue(self._device.stream(given[-1]), partial(super().multiply, *given))


@pytest.fixture(scope="module")
def matmuls(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Buckets for decoding 1 and for 8 tokens of 2 sequences."""
    folder, given = tmp_path_factory.mktemp("matmuls") / "artifact", buckets((1,), ragged=8, sequences=2)
    return write_artifact(model_of(checkpoint, block_tokens=4), folder, given, tiles=LibraryTiles())


def test_prompts_and_decoded_tokens_have_onnxruntimes_logits(matmuls: Artifact, reference: Artifact) -> None:
    device = InterpretedDevice()
    executor = CudaExecutor(matmuls, device, OPTIONS, open_matmuls=device.open_matmuls)
    library = device.matmuls[0]
    tried, captured = library.num_queued, device.num_captures
    assert tried > 0
    assert captured == 0
    sequence = Growing([IDS], [[3, 1]])
    found = np.concatenate([executor.forward(sequence.step([count])).copy() for count in (5, 1)])
    assert device.num_replays >= device.num_captures > 0
    executor.close()
    assert library.closed
    exact = OnnxRuntimeExecutor(reference, num_blocks=4)
    wanted = whole_logits(exact, IDS)
    exact.close()
    np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())


def test_the_descriptors_for_cublaslt_give_onnxruntimes_logits(matmuls: Artifact, reference: Artifact) -> None:
    device = InterpretedDevice()
    numpy = QueuedNumpy(device)
    executor = CudaExecutor(
        matmuls, device, OPTIONS, open_matmuls=lambda device, stream: CublasLt(device, stream, numpy.load)
    )
    found = whole_logits(executor, IDS)
    executor.close()
    assert not numpy.failed
    assert not numpy.live
    exact = OnnxRuntimeExecutor(reference, num_blocks=4)
    wanted = whole_logits(exact, IDS)
    exact.close()
    np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())


def test_greedy_tokens_are_onnxruntimes(matmuls: Artifact, reference: Artifact) -> None:
    device, params = InterpretedDevice(), SamplingParams(max_tokens=3, ignore_eos=True)
    executor = CudaExecutor(matmuls, device, OPTIONS, open_matmuls=device.open_matmuls)
    with Engine(executor, max_sequences=executor.max_sequences) as engine:
        found = engine.generate([IDS.tolist()], params)[0].token_ids
    with Engine.load(reference, kv_blocks=16) as engine:
        assert engine.generate([IDS.tolist()], params)[0].token_ids == found


def test_the_library_is_opened_only_for_programs_that_need_it(
    launches: Artifact, matmuls: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = InterpretedDevice()
    CudaExecutor(launches, device, OPTIONS, open_matmuls=device.open_matmuls).close()
    assert device.matmuls == []
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    with pytest.raises(EngineError, match=r"cuBLASLt cannot be loaded .*: .*pip install .*\[cublas\]', "):
        CudaExecutor(matmuls, device := InterpretedDevice(), OPTIONS)
    assert device.closed


@pytest.fixture
def halves(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    """A program in float16 that leaves open who multiplies, of which eight rows are many."""
    monkeypatch.setattr(library_matmuls, "FROM_ROWS", 8)
    given = buckets((1,), ragged=8, sequences=2)
    return write_artifact(model_of(checkpoint, block_tokens=4), tmp_path / "artifact", given, "fp16")


def logits_of(artifact: Artifact, device: InterpretedDevice, open_matmuls: OpenMatmuls) -> NDArray[np.float32]:
    executor = CudaExecutor(artifact, device, OPTIONS, open_matmuls=open_matmuls)
    found = whole_logits(executor, IDS)
    executor.close()
    return found


def test_an_installed_library_computes_matmuls_of_many_rows(halves: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    device = InterpretedDevice()
    found = logits_of(halves, device, device.open_matmuls)
    assert device.matmuls[0].num_queued > 0
    assert device.matmuls[0].closed
    monkeypatch.setenv("INGOT_CUBLASLT", "0")
    alone = InterpretedDevice()
    wanted = logits_of(halves, alone, alone.open_matmuls)
    assert alone.matmuls == []
    np.testing.assert_allclose(found, wanted, atol=5e-3 * np.abs(wanted).max())


def test_ingots_kernel_multiplies_where_the_library_is_missing_or_cannot(halves: Artifact) -> None:
    def missing(device: Device, stream: Stream) -> MatmulBinder:
        raise EngineError("cuBLASLt cannot be loaded")

    class Unable(InterpretedMatmuls):
        def __call__(self, matmul: LibraryMatmul, addresses: Mapping[str, int]) -> Queue:
            raise EngineError(f"{matmul.node}: no algorithm")

    device = InterpretedDevice()
    without = logits_of(halves, InterpretedDevice(), missing)
    np.testing.assert_array_equal(logits_of(halves, device, lambda *_: Unable(device)), without)


def test_only_plain_matmuls_of_many_rows_in_open_programs_may_go_to_the_library(halves: Artifact) -> None:
    program = read_launches(halves)
    assert library_matmuls.may_use_library(program)
    for changed in ({"tuned_on": "a GPU"}, {"batch_invariant": True}, {"activation_type": "fp32"}):
        assert not library_matmuls.may_use_library(program.model_copy(update=changed))
    ragged = next(one for one in program.programs if one.attention == "ragged")
    taken = library_matmuls.library_launches(program.kernels, ragged)
    assert taken
    launch, kernel = taken[0], program.kernels[taken[0].kernel]
    for constant, value in (("KIND", 2), ("KIND", 3), ("SPLITS", 2), ("HAS_SOFTCAP", True)):
        other = kernel.model_copy(update={"constants": {**kernel.constants, constant: value}})
        assert library_matmuls.library_matmul(other, launch) is None
    decode = next(one for one in program.programs if one.attention == "decode")
    assert not library_matmuls.library_launches(program.kernels, decode)


def test_the_library_multiplies_float8_with_the_scales_of_rows_and_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form: Entry = ("fp8", {"activations": "dynamic"})
    sizes = (Bucket.ragged(FEW_ROWS + 8, CONTEXT, 2),)
    artifact = write_artifact(
        fused(imported(CHECKPOINTS / "llama", form)), tmp_path / "a", sizes, "fp16", tiles=TileTable(sm=90)
    )
    program = read_launches(artifact)
    taken = library_matmuls.library_launches(program.kernels, program.programs[0])
    kinds = Counter(program.kernels[one.kernel].constants["KIND"] for one in taken)
    layers = artifact.manifest.model.num_layers
    assert kinds == {1: 4 * layers}, "queries, keys and values; output; gate and up; down"
    device, alone = InterpretedDevice(), InterpretedDevice()
    numpy = QueuedNumpy(device)
    found = logits_of(artifact, device, lambda device, stream: CublasLt(device, stream, numpy.load))
    assert not numpy.failed
    assert len(numpy.named("matmul")) >= 4 * layers
    monkeypatch.setenv("INGOT_CUBLASLT", "0")
    wanted = logits_of(artifact, alone, alone.open_matmuls)
    np.testing.assert_allclose(found, wanted, atol=5e-3 * np.abs(wanted).max())


def test_arguments_are_those_of_the_kernels_signature() -> None:
    assert tuple(SIGNATURES["matmul"].arguments) == library_matmuls.ARGUMENTS


def test_inspect_shows_what_the_library_computes(matmuls: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(matmuls.path), "--program", "--bucket", "decode-1"]) == 0
    shown = capsys.readouterr().out
    for words in ("cublaslt", "matmuls of unquantized weights", "1 x 128 x 32", "lm_head"):
        assert words in shown
