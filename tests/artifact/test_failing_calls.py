"""Whatever call on its files fails, a seal leaves the older artifact or the new one, whole, and no staging folder."""

import errno
from pathlib import Path

from ingot.artifact import ArtifactWriter, open_artifact
from ingot.errors import BuildError
from ingot.pipeline.checkpoint.safetensors_writer import SafetensorsWriter
from tests.artifact.tiny_artifact import describe, seal
from tests.simulators.failing_calls import FailingCalls, Failure, fail_each_call

_WEIGHTS = "program/weights.safetensors"


def seal_over(folder: Path, calls: FailingCalls) -> None:
    """Seal an artifact over an older one, and in an empty folder."""
    for name in ("older", "none"):
        output = folder / name
        output.mkdir()
        target = output / "a"
        if name == "older":
            seal(target, b"older")
        error = None
        try:
            seal_new(target, calls)
        except BuildError as problem:
            error = str(problem)
            assert str(target) in error
        require_whole(target, error, had_older=name == "older")
        if not calls.failure.forever:
            left = sorted(each.relative_to(output).as_posix() for each in output.rglob("*"))
            assert {each.split("/")[0] for each in left} <= {"a"}, (left, error)
        seal(target, b"later")
        assert weights_of(target) == b"later"


def seal_new(target: Path, calls: FailingCalls) -> None:
    """Seal an artifact, whose own files are written without failures."""
    with calls.on(target.parent):
        writer = ArtifactWriter(target)
    for name, data in {"program/segment-000.onnx": b"graph", _WEIGHTS: b"new"}.items():
        (writer.path / name).parent.mkdir(exist_ok=True)
        (writer.path / name).write_bytes(data)
    with calls.on(target.parent), writer:
        describe(writer)
        writer.seal()


def require_whole(target: Path, error: str | None, *, had_older: bool) -> None:
    """One of the two artifacts is there, and it is the new one without an error."""
    if not target.exists():
        assert error
        assert not had_older
        return
    open_artifact(target)
    found = weights_of(target)
    assert found in ((b"older", b"new") if had_older else (b"new",))
    assert error or found == b"new"


def weights_of(target: Path) -> bytes:
    return (target / _WEIGHTS).read_bytes()


def test_each_call_of_a_seal_may_fail(tmp_path: Path) -> None:
    errors = [0, errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EACCES]
    failures = [Failure(error, forever) for error in errors for forever in (False, True)]
    counts = fail_each_call(seal_over, tmp_path, failures, step=13)
    assert min(counts.values()) > 40


def write_tensors(folder: Path, calls: FailingCalls) -> None:
    """Write a file of tensors: all bytes, or an error."""
    content = bytes(range(256)) * 40
    file = folder / "w.safetensors"
    try:
        with calls.on(folder), SafetensorsWriter(file, 512) as writer:
            for name in ("a", "b"):
                writer.add(name, "U8", (len(content),), lambda write: write(content))
                writer.align(f"padding.{name}")
    except OSError:
        assert calls.failure.error
        return
    assert file.read_bytes()[512:] == content * 2


def test_each_call_of_writing_tensors_may_fail(tmp_path: Path) -> None:
    counts = fail_each_call(write_tensors, tmp_path, [Failure(0, False), Failure(0, True), Failure(errno.EIO, False)])
    assert min(counts.values()) > 3
