"""Processes find in the journal what others stored, and lose nothing but time with it."""

import os
from pathlib import Path

import pytest

from ingot.runtime.kv.disk import journal as journal_module
from ingot.runtime.kv.disk.journal import Journal, JournalNote


def opened(folder: Path) -> Journal:
    return Journal(os.open(folder / "journal", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))


def note(number: int) -> JournalNote:
    return JournalNote(bytes([number]) * 8, number)


def test_what_others_noted_is_news_once_and_own_notes_are_not(tmp_path: Path) -> None:
    journal, other = opened(tmp_path), opened(tmp_path)
    assert journal.news() == []
    journal.add(note(1))
    other.add(note(2))
    journal.add(note(3))
    other.add(note(4))
    assert journal.news() == [note(2), note(4)]
    assert journal.news() == []
    assert other.news() == [note(1), note(3)]
    late = opened(tmp_path)
    assert late.news() == [], "the tables have what was noted before"
    for each in (journal, other, late):
        each.close()


def test_a_note_that_is_half_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    journal, other = opened(tmp_path), opened(tmp_path)
    other.add(note(1))
    whole = (tmp_path / "journal").read_bytes()
    assert len(whole) == 16
    (tmp_path / "journal").write_bytes(whole + whole[:7])
    assert journal.news() == [note(1)]
    (tmp_path / "journal").write_bytes(whole + whole)
    assert journal.news() == [note(1)]
    journal.close()
    other.close()


def test_a_long_journal_is_emptied_and_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_MOST_BYTES", 160)
    journal, other = opened(tmp_path), opened(tmp_path)
    found: list[JournalNote] = []
    for number in range(100):
        other.add(note(number))
        found += journal.news()
        assert other.news() == []
    assert found == [note(number) for number in range(100)]
    assert (tmp_path / "journal").stat().st_size <= 160
    journal.close()
    other.close()


def test_a_journal_that_was_cut_loses_news_and_no_more(tmp_path: Path) -> None:
    journal, other = opened(tmp_path), opened(tmp_path)
    other.add(note(1))
    assert journal.news() == [note(1)]
    os.truncate(tmp_path / "journal", 0)
    assert journal.news() == []
    other.add(note(2))
    assert journal.news() == [note(2)]
    journal.close()
    other.close()


def test_a_full_disk_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    journal = opened(tmp_path)
    monkeypatch.setattr(os, "write", full)
    journal.add(note(1))
    journal.close()
