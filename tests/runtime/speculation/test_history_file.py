"""A history of outputs is kept in a file: what was saved is drafted again, and what cannot be used is named."""

import hashlib
import logging
import os
import random
import stat
import struct
from array import array
from pathlib import Path

import pytest

from ingot.runtime.kv.keys import prefix_scope, root_hash
from ingot.runtime.speculation.history_file import HistoryFile
from ingot.runtime.speculation.output_history import OutputHistory

VOCAB = 100
ROOT = root_hash("artifact", "layout")
SHARED, OTHER = prefix_scope(ROOT), prefix_scope(ROOT, cache_salt="other")


def file_in(folder: Path, identity: str = "mine", vocab_size: int = VOCAB) -> HistoryFile:
    return HistoryFile(folder, identity=identity, vocab_size=vocab_size)


def filled(window: int = 1024) -> OutputHistory:
    made = OutputHistory(window)
    made.add(array("q", [1, 2, 3, 4, 5]), SHARED)
    made.add(array("q", [1, 2, 7, 8, 9]), OTHER)
    return made


def loaded(file: HistoryFile) -> OutputHistory:
    made = OutputHistory(1024)
    file.load(made)
    return made


def saved(folder: Path) -> Path:
    file = file_in(folder)
    file.save(filled())
    return file.path


def resealed(body: bytes) -> bytes:
    """A file with the checksum of its content."""
    return body + hashlib.sha256(body).digest()


def test_what_was_saved_is_found_again_by_the_same_tenant_alone(tmp_path: Path) -> None:
    path = saved(tmp_path / "new" / "folder")
    made = loaded(file_in(path.parent))
    for scope, expected in ((SHARED, (3, 4, 5)), (OTHER, (7, 8, 9))):
        match = made.find(array("q", [6, 1, 2]), scope, 8, longer_than=0)
        assert match is not None
        assert match.copied == expected
    assert made.find(array("q", [6, 1, 2]), prefix_scope(ROOT, adapter="a"), 8, longer_than=0) is None
    assert (
        made.find(array("q", [6, 1, 2]), prefix_scope(root_hash("artifact", "another layout")), 8, longer_than=0)
        is None
    )


def test_only_its_owner_can_read_it_and_nothing_else_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    path = saved(folder)
    path.chmod(0o644)
    abandoned, recent = (path.with_suffix(f".{name}.tmp") for name in ("abandoned", "recent"))
    for each in (abandoned, recent):
        each.write_bytes(b"x")
    os.utime(abandoned, (0, 0))
    saved(folder)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(folder.iterdir()) == sorted([path, recent])
    assert b"other" not in path.read_bytes(), "a salt is in the file"


def test_each_artifact_has_a_file_of_its_own(tmp_path: Path) -> None:
    saved(tmp_path)
    assert len(loaded(file_in(tmp_path, identity="another"))) == 0
    file_in(tmp_path, identity="another").save(filled())
    assert len({each.name for each in tmp_path.iterdir()}) == 2


def damaged(content: bytes) -> dict[str, tuple[bytes, str]]:
    """Files that cannot be used, and the reason in the log."""
    body = content[:-32]
    return {
        "empty": (b"", "it is cut short"),
        "cut": (content[:-40], "it is damaged, its checksum differs"),
        "longer": (content + b"x", "it is damaged, its checksum differs"),
        "another file": (b"%PDF-1.7" + bytes(100), "it is not a history"),
        "a flipped bit": (content[:60] + bytes([content[60] ^ 1]) + content[61:], "its checksum differs"),
        "an older version": (
            resealed(body[:8] + bytes(4) + body[12:]),
            "it has version 0, this engine reads version 1",
        ),
        "another artifact": (resealed(body[:12] + bytes(32) + body[44:]), "it is of another artifact"),
        "more outputs": (resealed(body[:44] + struct.pack("<I", 1 << 31) + body[48:]), "its size contradicts"),
        "more tokens": (resealed(body[:48] + struct.pack("<Q", 1 << 62) + body[56:]), "its size contradicts"),
        "a length": (resealed(body[:88] + struct.pack("<I", 9) + body[92:]), "its tokens are not the model's"),
        "a token": (resealed(body[:-4] + struct.pack("<i", VOCAB)), "its tokens are not the model's"),
        "a negative token": (resealed(body[:-4] + struct.pack("<i", -1)), "its tokens are not the model's"),
    }


def test_a_file_that_cannot_be_used_is_named_and_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tmp_path)
    content = path.read_bytes()
    for name, (found, reason) in damaged(content).items():
        path.write_bytes(found)
        caplog.clear()
        file = file_in(tmp_path)
        assert len(loaded(file)) == 0, name
        assert reason in caplog.text, name
        assert str(path) in caplog.text
        file.save(filled())
        assert path.read_bytes() == content, name


def test_random_damage_never_raises(tmp_path: Path) -> None:
    path = saved(tmp_path)
    content = path.read_bytes()
    rng = random.Random(0)
    for _ in range(200):
        changed = bytearray(content[: rng.randrange(len(content) + 1)])
        for _ in range(rng.randrange(3)):
            if changed:
                changed[rng.randrange(len(changed))] = rng.randrange(256)
        path.write_bytes(resealed(bytes(changed)) if rng.random() < 0.5 else changed)
        made = loaded(file_in(tmp_path))
        for scope in (SHARED, OTHER):
            match = made.find(array("q", [6, 1, 2]), scope, 8, longer_than=0)
            assert match is None or all(0 <= token < VOCAB for token in match.copied)


def test_a_file_of_a_newer_version_stays_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tmp_path)
    body = path.read_bytes()[:-32]
    newer = resealed(body[:8] + struct.pack("<I", 2) + body[12:])
    path.write_bytes(newer)
    file = file_in(tmp_path)
    assert len(loaded(file)) == 0
    assert "it has version 2, this engine reads version 1, and stays as it is" in caplog.text
    file.save(filled())
    assert path.read_bytes() == newer


def test_a_link_a_pipe_and_a_folder_are_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert len(loaded(file_in(tmp_path))) == 0
    path.unlink()
    os.mkfifo(path)
    assert len(loaded(file_in(tmp_path))) == 0
    path.unlink()
    path.mkdir()
    assert len(loaded(file_in(tmp_path))) == 0
    assert caplog.text.count("suffix decoding begins without a history") == 3


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        file_in(tmp_path / "file").save(filled())
    assert "the history of suffix decoding was not kept" in caplog.text


def test_a_smaller_window_keeps_the_newest_outputs(tmp_path: Path) -> None:
    rng = random.Random(1)
    made = OutputHistory(4096)
    for _ in range(60):
        made.add(array("q", [rng.randrange(VOCAB) for _ in range(60)]), SHARED)
    made.add(array("q", [1, 2, 3, 4, 5]), SHARED)
    file_in(tmp_path).save(made)
    small = loaded(file_in(tmp_path))
    assert len(small) <= 1024
    match = small.find(array("q", [1, 2, 3]), SHARED, 8, longer_than=2)
    assert match is not None
    assert match.copied == (4, 5)


def test_what_another_engine_wrote_meanwhile_is_kept_too(tmp_path: Path) -> None:
    saved(tmp_path)
    first, second = file_in(tmp_path), file_in(tmp_path)
    of_first, of_second = loaded(first), loaded(second)
    of_first.add(array("q", [1, 9, 11, 12]), SHARED)
    of_second.add(array("q", [1, 10, 21, 22]), SHARED)
    first.save(of_first)
    second.save(of_second)
    made = loaded(file_in(tmp_path))
    assert [tokens.tolist() for _, tokens in made.outputs()] == [
        [1, 9, 11, 12],
        [1, 2, 3, 4, 5],
        [1, 2, 7, 8, 9],
        [1, 10, 21, 22],
    ]


def test_nothing_to_keep_leaves_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path)
    content = path.read_bytes()
    file_in(tmp_path).save(OutputHistory(1024))
    assert path.read_bytes() == content
