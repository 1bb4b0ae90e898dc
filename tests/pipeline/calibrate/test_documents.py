"""Documents of a text, a JSONL file or a folder of both; an unusable text is refused with its place."""

from pathlib import Path

import pytest

from ingot.errors import DataError
from ingot.pipeline.calibrate.documents import Document, read_corpus
from tests.each_case import each_case
from tests.pipeline.calibrate.calibration_texts import WORDS, read, write


def test_a_folder_is_read_in_path_order(tmp_path: Path) -> None:
    for folder, names in (("a", ("b.txt", "a/z.md", "c.jsonl")), ("b", ("c.jsonl", "b.txt", "a/z.md"))):
        for name in names:
            file = tmp_path / folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            write(file, {"text": f"c {WORDS}"}) if name == "c.jsonl" else file.write_text(f"{name[0]} {WORDS}")
        (tmp_path / folder / ".hidden.txt").write_text(WORDS)
        (tmp_path / folder / "image.png").write_bytes(b"\xff\xfe")
    first, second = read(tmp_path / "a"), read(tmp_path / "b")
    assert first.facts.sha256 == second.facts.sha256
    assert (first.facts.kind, first.facts.documents, first.facts.text) == ("folder", 3, "a")
    assert first.digest() == second.digest()
    (tmp_path / "b" / "b.txt").rename(tmp_path / "b" / "d.txt")
    assert read(tmp_path / "b").facts.sha256 != first.facts.sha256


@each_case(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", r"empty\.txt: the calibration text is empty; give a file or folder with text in it"),
        ("blank.txt", b" \n\t\n", r"the calibration text is empty"),
        ("empty.jsonl", b'\n{"text": ""}\n{"messages": []}\n', r"the calibration text is empty"),
        ("binary.txt", b"ab\nab\xff", r"binary\.txt:2: byte 5 is not UTF-8 \(invalid start byte\); convert"),
        ("none.txt", None, r"none\.txt: cannot read the calibration text: No such file or directory; check the path"),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": x}\n',
            r"^a\.jsonl:2, column 10: invalid JSON: Expecting value",
        ),
        ("a.jsonl", b'["x"]\n', r'^a\.jsonl:1: a record is a JSON object such as {"text": "..."}; this is \["x"\]$'),
        ("a.jsonl", b'{"txt": "x", "id": 1}\n', r"a\.jsonl:1: .* its keys: id, txt\. Did you mean 'txt'\? \(set calib"),
        ("a.jsonl", b"{}\n", r"none of the keys text, messages, prompt, completion; its keys: none\."),
        ("a.jsonl", b'\n{"text": 5}\n', r"^a\.jsonl:2: text is 5; it must be a string$"),
        ("a.jsonl", b'{"messages": "hi"}\n', r'messages is "hi"; it must be a list of messages'),
        (
            "a.jsonl",
            b'{"messages": [{"content": "hi"}]}\n',
            r'messages contains {"content": "hi"}; a message is an obj',
        ),
        ("a.jsonl", b'{"prompt": "hi"}\n', r"no key 'completion'; its keys: prompt\. \(both are required\)"),
        ("a.jsonl", b'{"prompt": "hi", "completion": 1}\n', r'prompt is "hi", completion is 1; both must be strings'),
    ],
)
def test_an_unusable_text_is_refused_with_its_place(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_corpus(tmp_path / name)


def test_an_unknown_field_is_refused_with_the_nearest_key(tmp_path: Path) -> None:
    text = write(tmp_path / "t.jsonl", {"content": WORDS})
    with pytest.raises(DataError, match=r"no key 'contents'; its keys: content\. Did you mean 'content'\?"):
        read_corpus(text, "contents")


def test_a_folder_without_text_is_refused_with_what_it_contains(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"")
    (tmp_path / "b.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"no calibration text; files with .*\.txt.* are read; found: 2 with .bin"):
        read_corpus(tmp_path)


def test_a_record_is_a_text_a_conversation_or_both(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = write(
        tmp_path / "t.jsonl",
        {"text": "a", "other": 1},
        {"messages": turns},
        "",
        {"prompt": "a", "completion": "b"},
        {"prompt": turns[:1], "completion": turns[1:]},
    )
    corpus = read_corpus(file)
    assert (corpus.name, corpus.kind) == ("t.jsonl", "jsonl")
    assert corpus.documents == [
        Document("t.jsonl:1", text="a"),
        Document("t.jsonl:2", messages=turns),
        Document("t.jsonl:4", text="ab", messages=tuple(turns)),
        Document("t.jsonl:5", messages=turns),
    ]


def test_a_text_file_is_one_document_without_its_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"\xef\xbb\xbf" + WORDS.encode())
    corpus = read_corpus(tmp_path / "t.txt")
    assert (corpus.kind, corpus.documents) == ("text", [Document("t.txt", text=WORDS)])
