"""JSON files of checkpoints: read as objects, written the same each time; wrong values are refused by key."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.artifact.json_text import read_json_object
from ingot.errors import CheckpointError, ConfigError
from ingot.pipeline.checkpoint.json_files import ConfigReader, write_json
from tests.each_case import each_case

VALUES = {"n": 0, "x": -1.5, "b": 1, "s": "siluu", "ids": [1, -1], "list": [1, 2], "o": [], "big": float("inf")}


def reader(**values: Any) -> ConfigReader:
    return ConfigReader("config.json", values or VALUES, {"d": 7, "absent": None})


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, content in (("a", {"y": 1, "x": [2]}), ("b", {"x": [2], "y": 1})):
        write_json(tmp_path / name, content)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert read_json_object(tmp_path / "a") == {"x": [2], "y": 1}


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, CheckpointError, "cannot be read: No such file or directory"),
        (b"{", ConfigError, r"is not JSON \(.*\); download or copy it again"),
        (b"\xff{}", ConfigError, "is not JSON"),
        (b"[1]", ConfigError, "is a JSON list, it must be an object"),
    ],
)
def test_a_file_that_is_not_an_object_is_refused(
    tmp_path: Path, content: bytes | None, error: type[CheckpointError], message: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(error, match=rf"config\.json: {message}"):
        read_json_object(tmp_path / "config.json")


def test_an_absent_key_takes_its_default_and_null_is_none() -> None:
    read = reader(n=4, nothing=None, ids=3, flags=[2, 1.5])
    assert (read.integer("d"), read.integer("n"), read.optional_integer("nothing")) == (7, 4, None)
    assert (read.optional_number("absent"), read.number("n")) == (None, 4.0)
    assert (read.boolean("nothing"), read.optional_object("nothing")) == (False, None)
    assert (read.integers("ids"), read.integers("nothing"), read.numbers("flags", 2)) == ((3,), None, (2.0, 1.5))
    assert (read.reads("d"), read.reads("n")) == (True, False)


@each_case(
    ("read", "message"),
    [
        (lambda r: r.integer("n"), "n is 0; it must be a whole number from 1 up"),
        (lambda r: r.integer("x", 0), "x is -1.5; it must be a whole number from 0 up"),
        (lambda r: r.integer("gone"), "gone is missing; it must be a whole number"),
        (lambda r: r.integer("d", 8), r"d is 7 \(the default of this model_type\); it must be a whole number from 8"),
        (lambda r: r.number("x"), "x is -1.5; it must be a finite number above 0"),
        (lambda r: r.number("big", positive=False), "big is inf; it must be a finite number$"),
        (lambda r: r.boolean("b"), "b is 1; it must be true or false"),
        (lambda r: r.choice("s", ["silu", "gelu"]), r"s is 'siluu'; it must be one of .*\. Did you mean 'silu'\?"),
        (
            lambda r: r.integers("ids"),
            r"ids is \[1, -1\]; it must be a whole number from 0 to 2147483647, or a li",
        ),
        (lambda r: r.numbers("list", 3), r"list is \[1, 2\]; it must be a list of 3 numbers above 0"),
        (lambda r: r.optional_object("o"), r"o is \[\]; it must be an object or null"),
    ],
)
def test_a_wrong_value_is_refused_by_key_with_what_is_allowed(
    read: Callable[[ConfigReader], object], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^config\.json: {message}"):
        read(reader())
