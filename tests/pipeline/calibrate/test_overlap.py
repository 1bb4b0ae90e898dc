"""The calibration text is compared with the evaluation text: the same text is refused, an overlap is measured."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from ingot.errors import DataError
from ingot.pipeline.calibrate.overlap import WINDOW, HeldOutText, shared_share
from tests.data_paths import DEMO_MODEL
from tests.pipeline.calibrate.calibration_texts import WORDS, read, write

HELD_OUT = (DEMO_MODEL / "heldout.txt").read_text(encoding="utf-8")[:20_000]
OTHER = "".join(f"def other_{n}(value):\n    return value * {n * n} + {n}\n\n" for n in range(400))


@pytest.fixture
def held_out(tmp_path: Path) -> HeldOutText:
    file = tmp_path / "evaluation" / "heldout.txt"
    file.parent.mkdir()
    file.write_text(HELD_OUT, encoding="utf-8")
    return HeldOutText(file, 4096)


def chunked(text: str, size: int = 1000) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def test_the_same_file_is_refused(held_out: HeldOutText) -> None:
    with pytest.raises(
        DataError, match=r"calibration text heldout\.txt and the evaluation text heldout\.txt are the same text: .*Give"
    ):
        read(held_out.file, held_out=held_out)


def test_the_same_text_in_another_form_is_refused(tmp_path: Path, held_out: HeldOutText) -> None:
    (tmp_path / "crlf.txt").write_bytes(HELD_OUT.replace("\n", "\r\n").encode())
    (tmp_path / "mark.txt").write_text(f"\ufeff{HELD_OUT}\n\n", encoding="utf-8")
    write(tmp_path / "one.jsonl", {"text": HELD_OUT})
    write(tmp_path / "lines.jsonl", *({"text": line} for line in HELD_OUT.splitlines()))
    write(tmp_path / "pieces.jsonl", *({"prompt": piece, "completion": ""} for piece in chunked(HELD_OUT)))
    write(tmp_path / "among.jsonl", {"text": OTHER}, {"text": HELD_OUT}, {"text": WORDS})
    for name in ("crlf.txt", "mark.txt", "one.jsonl", "lines.jsonl", "pieces.jsonl", "among.jsonl"):
        with pytest.raises(DataError, match="are the same text"):
            read(tmp_path / name, held_out=held_out)


def test_a_folder_that_holds_the_evaluation_text_is_refused_with_the_file(
    tmp_path: Path, held_out: HeldOutText
) -> None:
    corpus = tmp_path / "corpus"
    (corpus / "deep").mkdir(parents=True)
    (corpus / "a.txt").write_text(OTHER * 5, encoding="utf-8")
    (corpus / "deep" / "copy.md").write_text(HELD_OUT, encoding="utf-8")
    with pytest.raises(DataError, match=r"calibration text deep/copy\.md and the evaluation text"):
        read(corpus, held_out=held_out)


def test_evaluation_records_equal_to_the_calibration_text_are_refused(tmp_path: Path) -> None:
    records = write(tmp_path / "eval.jsonl", *({"text": line} for line in HELD_OUT.splitlines()))
    text = tmp_path / "calibration.txt"
    text.write_text(HELD_OUT, encoding="utf-8")
    with pytest.raises(DataError, match=r"evaluation text eval\.jsonl are the same text"):
        read(text, held_out=HeldOutText(records, 64))


def test_messages_with_the_evaluation_text_are_refused(tmp_path: Path, held_out: HeldOutText) -> None:
    turns = [{"role": "user", "content": HELD_OUT[:100]}, {"role": "assistant", "content": HELD_OUT[100:]}]
    chats = write(tmp_path / "chats.jsonl", {"messages": turns})
    with pytest.raises(DataError, match="are the same text"):
        read(chats, chat_template=True, held_out=held_out)


def test_most_of_the_evaluation_text_among_others_is_refused_with_the_share(
    tmp_path: Path, held_out: HeldOutText
) -> None:
    text = tmp_path / "mixed.txt"
    text.write_text(f"{OTHER}# a line more\n{HELD_OUT}# and one\n{OTHER}", encoding="utf-8")
    with pytest.raises(DataError, match=r"^(99|100)\.\d\d% of the evaluated tokens are in runs of 32 or more .* mixed"):
        read(text, held_out=held_out)


def test_an_overlap_is_recorded_and_warned_of(
    tmp_path: Path, held_out: HeldOutText, caplog: pytest.LogCaptureFixture
) -> None:
    text = tmp_path / "mixed.txt"
    text.write_text(f"{OTHER}{HELD_OUT[3000:5000]}{OTHER}", encoding="utf-8")
    with caplog.at_level(logging.WARNING, "ingot.pipeline"):
        data = read(text, held_out=held_out)
    share = data.facts.evaluation_overlap
    assert share is not None
    assert 0.05 < share < 0.4
    assert (
        f"{share:.2%} of the evaluated tokens are in runs of 32 or more that the calibration text mixed" in caplog.text
    )
    assert json.loads(json.dumps(data.facts.as_json()))["evaluation_overlap"] == share


def test_texts_without_an_overlap_are_accepted_in_silence(
    tmp_path: Path, held_out: HeldOutText, caplog: pytest.LogCaptureFixture
) -> None:
    text = tmp_path / "other.txt"
    text.write_text(OTHER, encoding="utf-8")
    with caplog.at_level(logging.WARNING, "ingot.pipeline"):
        assert read(text, held_out=held_out).facts.evaluation_overlap == 0
        assert read(text).facts.evaluation_overlap is None
    assert not caplog.text


def test_only_the_evaluated_part_counts(tmp_path: Path, held_out: HeldOutText) -> None:
    text = tmp_path / "end.txt"
    text.write_text(OTHER + HELD_OUT[-4000:], encoding="utf-8")
    assert read(text, held_out=HeldOutText(held_out.file, 1000)).facts.evaluation_overlap == 0


def test_the_share_is_that_of_tokens_in_common_runs() -> None:
    rng = np.random.default_rng(0)
    text, other = (rng.integers(0, 50_000, 1000) for _ in range(2))
    assert shared_share(text, [other]) == 0
    assert shared_share(text, [other, text]) == 1
    quoted = np.concatenate([other[:10], text[100:200], other[10:]])
    assert shared_share(text, [quoted]) == 0.1
    assert shared_share(text, [quoted[: 10 + WINDOW], other]) == WINDOW / 1000
    assert shared_share(text, [quoted[: 10 + WINDOW - 1]]) == 0
    assert shared_share(text[: WINDOW - 1], [text]) == 0
    assert shared_share(text, []) == 0


def test_runs_are_found_across_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.pipeline.calibrate.overlap._BATCH", 8)
    text = np.arange(400)
    assert shared_share(text, [text[at : at + 40] for at in range(0, 400, 40)]) == 1


def test_a_run_that_the_text_repeats_is_found_wherever_it_is() -> None:
    text = np.tile(np.arange(50), 4)
    assert shared_share(text, [np.arange(50)]) == (4 * 50) / 200
    assert shared_share(text, [np.arange(WINDOW)]) == 4 * WINDOW / 200


def test_permuted_tokens_are_no_overlap() -> None:
    text = np.tile(np.arange(WINDOW), 4)
    assert shared_share(text[:WINDOW], [text[:WINDOW][::-1]]) == 0
