"""Whatever call on its files fails, a build makes its artifact, whole, or ends with one error that names a file."""

import errno
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from ingot.artifact import open_artifact
from ingot.builder import build
from ingot.cli.failure import failure_of
from ingot.errors import IngotError
from tests.conftest import UNMEASURED
from tests.data_paths import ROOT
from tests.simulators.failing_calls import FailingCalls, Failure, fail_each_call

_CHECKPOINT = ROOT / "tests" / "fixtures" / "checkpoints" / "llama"


def build_to(target: Path, checkpoint: Path) -> None:
    build("int4-cpu", [f"checkpoint={checkpoint}", "passes.quantize-weights.block_size=64", *UNMEASURED], target)


@cache
def whole() -> str:
    """The identity of the artifact."""
    with TemporaryDirectory() as folder:
        build_to(Path(folder, "a"), _CHECKPOINT)
        return open_artifact(Path(folder, "a")).manifest.identity


def build_from_copy(folder: Path, calls: FailingCalls) -> None:
    """Build from a checkpoint in the folder whose files may fail, as those that are written may."""
    identity = whole()
    checkpoint, output = folder / "llama", folder / "output"
    shutil.copytree(_CHECKPOINT, checkpoint)
    output.mkdir()
    target = output / "a"
    error = None
    try:
        with calls.on(folder):
            build_to(target, checkpoint)
    except (IngotError, OSError) as problem:
        failure = failure_of(problem)
        assert failure
        error = failure.message
        assert str(folder) in error, error
    if target.exists():
        assert open_artifact(target).manifest.identity == identity
    else:
        assert error
    if not calls.failure.forever:
        left = sorted(each.name for each in output.iterdir())
        assert left == ["a"] * target.exists(), (left, error)


ERRORS = (0, errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EACCES)
FAILURES = [Failure(error, forever) for error in ERRORS for forever in (False, True)]


def test_a_sample_of_the_calls_of_a_build_may_fail(tmp_path: Path) -> None:
    failures = [Failure(errno.EIO, False), Failure(errno.ENOSPC, True), Failure(0, False)]
    counts = fail_each_call(build_from_copy, tmp_path, failures, step=211)
    assert min(counts.values()) > 600


# A proof: see .ci/proofs.toml.
def test_each_call_of_a_build_may_fail(tmp_path: Path) -> None:
    counts = fail_each_call(build_from_copy, tmp_path, FAILURES, step=83)
    assert min(counts.values()) > 700
