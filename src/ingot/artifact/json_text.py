"""JSON of files that others wrote: parsed with limits, so that no file costs a stack, a memory or a silent choice.

Python's parser accepts what a reader cannot use safely: nesting until its stack ends, a key twice (the last one wins),
NaN. All of these are a ValueError here.
"""

import json
import os
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from ingot.errors import ArtifactError, CheckpointError, ConfigError, shown
from ingot.sizes import format_bytes

MAX_JSON_BYTES = 100_000_000
_Model = TypeVar("_Model", bound=BaseModel)
_PLACE_CHARACTERS = 80  # length of a key in a message


def parse_json(text: bytes | str, *, allow_nan: bool = False) -> Any:
    """Parse a JSON text; ValueError with its problem. `allow_nan` accepts NaN and Infinity, which JSON lacks."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=None if allow_nan else _refuse_constant)
    except RecursionError:
        raise ValueError("arrays or objects are nested too deeply") from None


def read_limited(file: Path, most: int = MAX_JSON_BYTES) -> bytes:
    """Read a whole file; ValueError for one larger than `most` bytes, OSError when it cannot be read."""
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size or most  # 0 for what is not a regular file
        content = stream.read(min(most, size) + 1)  # Python allocates all that it is asked to read
    if len(content) > most:
        raise ValueError(f"it is larger than {format_bytes(most)}")
    return content


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in a checkpoint's file. CheckpointError when it cannot be read, ConfigError for something else."""
    try:
        value = parse_json(read_limited(file), allow_nan=True)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: is not JSON ({error}); download or copy it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: is a JSON {type(value).__name__}, it must be an object")
    return value


def read_program(file: Path, model: type[_Model], most: int) -> _Model:
    """Read a program of up to `most` bytes; ArtifactError with the file and its first problem."""
    try:
        return model.model_validate_json(read_limited(file, most), strict=True)
    except OSError as error:
        raise ArtifactError(f"{file}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise ArtifactError(f"{file}: {first_problem(error)}; build the artifact again") from error
    except ValueError as error:
        raise ArtifactError(f"{file}: {error}; build the artifact again") from error


def first_problem(error: ValidationError) -> str:
    """Return the first problem of a file as key, what is wrong, and the value."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part)[:_PLACE_CHARACTERS] for part in first["loc"]) or "the file"
    value = first["input"]
    given = f" (it is {shown(value)})" if isinstance(value, str | int | float | None) else ""
    what = first["msg"]
    if first["type"] == "union_tag_invalid":  # pydantic's message has the whole tag, however long
        tag = first["ctx"]
        what = f"{tag['discriminator']} is {shown(tag['tag'])}, none of {tag['expected_tags']}"
    return f"{place}: {what}{given}"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"an object has the key {shown(twice)} twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which JSON does not have")


def invalid_file(file: Path, content: str, error: ValidationError) -> ArtifactError:
    """Return the refusal of a sealed file of evidence, with its first wrong value."""
    first = error.errors()[0]
    reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
    return ArtifactError(f"{file}: invalid {content} ({reason}); build the artifact again")
