"""JSON files of checkpoints: read as objects, and written alike wherever one is written."""

import json
from pathlib import Path
from typing import Any

from ingot.errors import CheckpointError, ConfigError


def read_json_object(file: Path) -> dict[str, Any]:
    """The file's object. CheckpointError when it cannot be read, ConfigError when it holds something else."""
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: is not JSON ({error}); download or copy it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: is a JSON {type(value).__name__}, it must be an object")
    return value


def write_json(file: Path, content: object) -> None:
    """Write it indented, keys in order: the same content gives the same bytes."""
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
