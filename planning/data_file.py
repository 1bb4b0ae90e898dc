"""Reads a small YAML file of data: bounded, plain values, one error that names file, field and value."""

from pathlib import Path

import yaml
from pydantic import ValidationError

from ingot.errors import DataError, shown

_MOST_BYTES = 1 << 20


def read_data_file(file: Path) -> object:
    """Parse a file. DataError for one that is too large, has aliases, or is not YAML."""
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise DataError(f"{file}: larger than {_MOST_BYTES:,} bytes, which no file of rows is")
        text = file.read_text(encoding="utf-8")
        # Aliases repeat parts of a file without end.
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise DataError(f"{file}: has aliases (*name); write each row out")
        return yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read as YAML: {' '.join(str(error).split())[:200]}") from error


def validation_problem(error: ValidationError) -> str:
    """The first problem that pydantic found: field, value, what is allowed."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place or 'the file'}: {first['msg']}; it is {shown(first['input'])}"
