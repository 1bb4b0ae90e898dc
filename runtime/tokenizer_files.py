"""The files of a tokenizer's folder, read with types: what is missing or damaged is refused by name."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from ingot.errors import ArtifactError

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"

_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclass(frozen=True)
class TokenizerConfig:
    """tokenizer_config.json and generation_config.json, as far as the runtime reads them.

    special_tokens   bos_token, eos_token, ... -> the token's text
    add_bos, add_eos None when the file does not say: then tokenizer.json alone decides
    eos_token_ids    end tokens of generation_config.json
    chat_templates   name -> jinja2 source; "default" is the usual one
    """

    special_tokens: Mapping[str, str]
    add_bos: bool | None
    add_eos: bool | None
    eos_token_ids: tuple[int, ...]
    chat_templates: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> "TokenizerConfig":
        """Read what the folder holds; absent files leave their part empty. ArtifactError for a damaged one."""
        config = _JsonFile.read(folder / TOKENIZER_CONFIG)
        generation = _JsonFile.read(folder / GENERATION_CONFIG)
        templates = config.templates()
        if (folder / CHAT_TEMPLATE).is_file():
            templates = {**templates, "default": _read_text(folder / CHAT_TEMPLATE)}
        return cls(
            special_tokens={name: text for name in _SPECIAL_TOKENS if (text := config.token(name)) is not None},
            add_bos=config.flag("add_bos_token"),
            add_eos=config.flag("add_eos_token"),
            eos_token_ids=generation.token_ids("eos_token_id"),
            chat_templates=templates,
        )


@dataclass(frozen=True)
class _JsonFile:
    """A JSON object and the file it came from, for messages."""

    path: Path
    values: Mapping[str, object]

    @classmethod
    def read(cls, path: Path) -> "_JsonFile":
        if not path.is_file():
            return cls(path, {})
        values = read_json(path)
        if not isinstance(values, dict):
            raise ArtifactError(f"{path} holds a {type(values).__name__}; it must be a JSON object")
        return cls(path, values)

    def refuse(self, key: str, allowed: str) -> ArtifactError:
        return ArtifactError(f"{self.path}: {key} is {self.values[key]!r}; it must be {allowed}")

    def flag(self, key: str) -> bool | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(key, "true, false or absent")
        return value

    def token(self, key: str) -> str | None:
        """A special token: its text, or the long form {"content": text}."""
        value = self.values.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if value is not None and not isinstance(text, str):
            raise self.refuse(key, "a text or an object with a text as content")
        return text if isinstance(text, str) else None

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.values.get(key)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in found):
            raise self.refuse(key, "a token id or a list of token ids")
        return tuple(found)

    def templates(self) -> dict[str, str]:
        """chat_template: a text, or a list of {"name": ..., "template": ...}."""
        key = "chat_template"
        value = self.values.get(key)
        if isinstance(value, str):
            return {"default": value}
        named: dict[str, str] = {}
        for entry in value if isinstance(value, list) else [] if value is None else [value]:
            name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
            if not isinstance(name, str) or not isinstance(template, str):
                raise self.refuse(key, 'a text or a list of {"name": text, "template": text}')
            named[name] = template
        return named


def read_json(path: Path) -> object:
    """The file's JSON; ArtifactError with its name when it is missing or damaged."""
    try:
        value: object = json.loads(_read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ArtifactError(f"{path} is no valid JSON ({error}); copy it again from the checkpoint") from error
    return value


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """tokenizer.json as the tokenizers package reads it, without the truncation and padding it may ask for."""
    text = _read_text(path)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises a bare Exception for anything it cannot read
        raise ArtifactError(f"{path} is no tokenizer that can be read ({error}); copy it again") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{path} is not UTF-8 text ({error}); copy it again from the checkpoint") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise ArtifactError(f"{path} cannot be read ({reason}); the tokenizer's folder must hold it") from error
