"""The TensorRT library at run time: the right version, engines, and its log."""

import logging
from pathlib import Path

import pytest

from ingot.errors import ArtifactError, EngineError
from ingot.runtime.cuda.plan_library import PlanLibrary, load_plan_library, tensorrt_logger
from tests.simulators.fake_tensorrt import VERSION, FakeTensorRT, importing


def library_of(trt: FakeTensorRT | None, name: str = "tensorrt-rtx") -> PlanLibrary:
    return load_plan_library(name, VERSION, importing(trt))


def test_a_missing_package_is_named_with_its_version() -> None:
    with pytest.raises(
        EngineError,
        match=r"needs tensorrt-rtx 1.7.1.116: .*pip install .*\[tensorrt\]' tensorrt-rtx==",
    ):
        library_of(None)


def test_another_version_is_refused() -> None:
    with pytest.raises(
        EngineError, match=r"plans are of tensorrt-rtx 1.7.1.116, and 1.8.0.5 is installed: pip install"
    ):
        library_of(FakeTensorRT("1.8.0.5"))


def test_an_unknown_library_is_refused() -> None:
    with pytest.raises(ArtifactError, match="plans are of 'openvino', which this version of Ingot does not support"):
        library_of(FakeTensorRT(), "openvino")


def test_a_plan_that_tensorrt_rejects_is_an_error_with_its_diagnosis() -> None:
    with pytest.raises(EngineError, match=r"segment-000.plan: .* rejects the plan \(OLD_CUDA_DRIVER\)"):
        library_of(FakeTensorRT(refuses=True)).engine(b"some plan", "program/segment-000.plan")


def test_tensorrts_log_goes_to_pythons(caplog: pytest.LogCaptureFixture) -> None:
    trt = FakeTensorRT()
    trt.__name__ = "a stand-in"
    logger = tensorrt_logger(trt)
    assert tensorrt_logger(trt) is logger
    with caplog.at_level(logging.DEBUG, "ingot.tensorrt"):
        logger.log(2, "a warning")
        logger.log(4, "a detail")
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "a warning"),
        ("DEBUG", "a detail"),
    ]


def test_compiled_kernels_are_saved_only_when_there_are_new_ones(tmp_path: Path) -> None:
    trt, file = FakeTensorRT(), tmp_path / "cache" / "compiled"
    library = library_of(trt)
    library.use_cache(file)
    library.make_context(library.engine(b"some plan", "a.plan"))
    library.save_cache()
    assert not file.exists()
    library.compiled = True
    library.save_cache()
    assert file.read_bytes() == b"compiled"
    assert not library.compiled
    assert [one.name for one in file.parent.iterdir()] == ["compiled"]
