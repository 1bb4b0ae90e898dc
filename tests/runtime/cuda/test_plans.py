"""Plans make the right calls of TensorRT in the right order, on stand-ins for TensorRT and the GPU."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ingot.artifact import Artifact
from ingot.artifact.programs.launch_program import BufferArgument, SegmentCall
from ingot.artifact.programs.plan_facts import PLANS_FILE, PlanFacts, PlanProfile, ProgramPlans
from ingot.errors import ArtifactError, EngineError
from ingot.runtime.cuda.driver.device import Device
from ingot.runtime.cuda.plans import Plans
from tests.simulators.fake_tensorrt import VERSION, FakeTensorRT, importing

FILE = "program/segment-000.plan"


class Gpu:
    """The methods of a device that plans use."""

    name, sm = "a GPU", 89

    def __init__(self) -> None:
        self.freed: list[int] = []

    def allocate(self, size: int, what: str) -> int:
        return 4096

    def free(self, address: int) -> None:
        self.freed.append(address)


def call(profile: int = 0, rows: int = 1, layer: int = 0, file: str = FILE, *, captured: bool = True) -> SegmentCall:
    buffer = BufferArgument(name="hidden", type="fp16")
    return SegmentCall(
        file=file,
        profile=profile,
        inputs={"x0": buffer},
        outputs={"y0": buffer},
        shapes={"x0": (rows, 64)},
        captured=captured,
        node=f"... layers.{layer}",
    )


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "program").mkdir()
    profile = PlanProfile(least_rows=1, most_rows=1, operators={})
    facts = PlanFacts(
        file=FILE, library="tensorrt-rtx", version=VERSION, sms=(86, 89), bytes=9, weight_bytes=0, profiles=(profile,)
    )
    (tmp_path / PLANS_FILE).write_text(ProgramPlans(plans=(facts,)).model_dump_json())
    (tmp_path / FILE).write_bytes(b"some plan")
    return cast(Artifact, SimpleNamespace(file=lambda name: tmp_path / name))


def plans_of(artifact: Artifact, trt: FakeTensorRT, gpu: Gpu | None = None) -> Plans:
    return Plans.open(artifact, cast(Device, gpu or Gpu()), 7, importing(trt))


def test_layers_share_a_context_and_buckets_do_not(artifact: Artifact) -> None:
    trt = FakeTensorRT()
    plans = plans_of(artifact, trt)
    for one in (call(), call(layer=1), call(profile=1, rows=8), call(profile=1, rows=16)):
        plans(one, {})
    assert len(plans.contexts) == 3
    assert [one for one in trt.calls if one[0] == "profile"] == [("profile", 0), ("profile", 1), ("profile", 1)]
    assert {one for one in trt.calls if one[0] == "memory"} == {("memory", 4096, 2000)}  # the largest, shared by all
    assert ("allocation", "USER_MANAGED") in trt.calls
    assert len({id(cache) for cache in trt.caches}) == 1


def test_each_call_gives_the_shared_context_its_own_addresses(artifact: Artifact) -> None:
    trt = FakeTensorRT()
    plans = plans_of(artifact, trt)
    first = plans(call(), {"x0": 100, "y0": 200})
    second = plans(call(layer=1), {"x0": 300, "y0": 400})
    trt.calls.clear()
    first(9)
    second(9)
    assert trt.calls == [("x0", 100), ("y0", 200), ("execute", 9), ("x0", 300), ("y0", 400), ("execute", 9)]


def test_calls_that_no_graph_captures_share_a_context_that_takes_their_shapes(artifact: Artifact) -> None:
    trt = FakeTensorRT()
    plans = plans_of(artifact, trt)
    queued = [plans(call(profile, rows, captured=False), {}) for profile, rows in ((1, 128), (1, 256), (0, 32))]
    plans(call(profile=1, rows=64), {})
    assert len(plans.contexts) == 2
    trt.calls.clear()
    for run in (queued[0], queued[0], queued[1], queued[2]):
        run(9)
    changes = [one for one in trt.calls if one[0] in ("profile", "shape", "execute")]
    assert changes == [
        *(("profile", 1), ("shape", "x0", (128, 64)), ("execute", 9), ("execute", 9)),
        *(("shape", "x0", (256, 64)), ("execute", 9)),
        *(("profile", 0), ("shape", "x0", (32, 64)), ("execute", 9)),
    ]


def test_a_call_that_cannot_be_captured_after_its_rehearsal_is_refused(artifact: Artifact) -> None:
    plans = plans_of(artifact, FakeTensorRT())
    plans(call(), {})(7)
    plans(call(), {})
    next(iter(plans.contexts.values())).execution.is_stream_capturable = lambda stream: False
    with pytest.raises(EngineError, match=r"segment-000.plan cannot be captured into a CUDA graph"):
        plans(call(), {})


def test_compiled_kernels_are_kept_after_the_rehearsal_for_the_next_start(artifact: Artifact, tmp_path: Path) -> None:
    plans = plans_of(artifact, FakeTensorRT())
    plans(call(), {})(7)
    assert not (tmp_path / "cache").exists()
    plans(call(), {})
    (kept,) = (tmp_path / "cache" / "compiled-plans").iterdir()
    assert kept.name == f"tensorrt-rtx-{VERSION}-a-GPU-sm89"
    assert kept.read_bytes() == b"compiled"
    again = FakeTensorRT()
    plans_of(artifact, again)(call(), {})
    assert again.loaded_caches == [b"compiled"]


def test_closing_frees_the_memory_once(artifact: Artifact) -> None:
    gpu = Gpu()
    plans = plans_of(artifact, FakeTensorRT(), gpu)
    plans(call(), {})
    plans.close()
    plans.close()
    assert gpu.freed == [4096]
    assert not plans.contexts


def test_a_plan_whose_header_is_of_another_version_is_refused(artifact: Artifact) -> None:
    header = b"vtrt".ljust(24, b"\0") + bytes((1, 6, 0, 2)) + bytes(100)
    artifact.file(FILE).write_bytes(header)
    with pytest.raises(EngineError, match=r"segment-000.plan is of tensorrt-rtx 1.6.0.2, and 1.7.1.116 is installed"):
        plans_of(artifact, FakeTensorRT())


def test_a_gpu_that_the_plans_are_not_for_is_refused(artifact: Artifact) -> None:
    gpu = Gpu()
    gpu.sm = 90
    with pytest.raises(EngineError, match=r"for SM 86, 89, and a GPU has SM 90.*90 among gpu.sms, or.*cuda-sm90"):
        plans_of(artifact, FakeTensorRT(), gpu)


def test_calls_that_do_not_fit_the_plans_are_refused(artifact: Artifact) -> None:
    with pytest.raises(EngineError, match="has no profile 2 to run"):
        plans_of(artifact, FakeTensorRT())(call(profile=2), {})
    plans = plans_of(artifact, FakeTensorRT())
    with pytest.raises(EngineError, match=r"segment-000.plan has no tensor 'missing'"):
        plans(call(), {"missing": 1})(7)
    with pytest.raises(ArtifactError, match=r"names no plan program/segment-009.plan"):
        plans(call(file="program/segment-009.plan"), {})


def test_facts_that_cannot_be_read_are_refused(artifact: Artifact) -> None:
    artifact.file(PLANS_FILE).write_text("{}")
    with pytest.raises(ArtifactError, match=r"plans.json: .*build the artifact again"):
        plans_of(artifact, FakeTensorRT())
