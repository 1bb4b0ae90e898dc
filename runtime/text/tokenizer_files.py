"""The JSON files of a tokenizer's folder, read with types. ArtifactError names file, key, value and what is allowed."""

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ingot.artifact.json_text import parse_json
from ingot.errors import ArtifactError, shown

MAX_TOKEN_ID = 2**31 - 1
_MAX_BYTES = 1 << 28  # the largest tokenizer.json has 40 MB
_TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


def _unicode(text: str) -> str:
    """The text; ValueError for half a surrogate pair, which JSON can spell and no tokenizer reads."""
    text.encode()
    return text


_Text = Annotated[str, AfterValidator(_unicode)]


def _content(value: object) -> object:
    """A special token's text; its long form is {"content": text}."""
    return value["content"] if isinstance(value, dict) and isinstance(value.get("content"), str) else value


_Token = Annotated[
    _Text | None,
    BeforeValidator(_content),
    Field(description="a text or an object with a text as content"),
]


class _JsonFile(BaseModel):
    """An optional JSON file of the folder. A field's description says what is allowed, for error messages."""

    model_config = ConfigDict(strict=True, frozen=True)

    @classmethod
    def read(cls, path: Path | None) -> Self:
        """Read it; None has no entries. ArtifactError for a damaged one, with the key of a wrong value."""
        values = read_json(path) if path else {}
        if not isinstance(values, dict):
            raise ArtifactError(f"{path} contains a {type(values).__name__}; it must be a JSON object")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            key = str(error.errors()[0]["loc"][0])
            allowed = cls.model_fields[key].description
            raise ArtifactError(f"{path}: {key} is {shown(values[key])}; it must be {allowed}") from error


class _NamedTemplate(BaseModel):
    name: _Text
    template: _Text


class TokenizerConfig(_JsonFile):
    """tokenizer_config.json.

    Its add_bos_token and add_eos_token are for tokenizers without a tokenizer.json, whose post-processor decides here:
    transformers 5 drops them too.
    """

    bos_token: _Token = None
    eos_token: _Token = None
    unk_token: _Token = None
    sep_token: _Token = None
    pad_token: _Token = None
    cls_token: _Token = None
    mask_token: _Token = None
    chat_template: _Text | _NamedTemplate | list[_NamedTemplate] | None = Field(
        None, description='a text or a list of {"name": text, "template": text}'
    )
    response_template: dict[str, Any] | None = Field(None, description="an object, as transformers defines it")

    @property
    def special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token, ... -> the token's text."""
        names = [name for name in type(self).model_fields if name.endswith("_token")]
        return {name: text for name in names if (text := getattr(self, name)) is not None}

    @property
    def chat_templates(self) -> dict[str, str]:
        """Name -> jinja2 source; "default" is the usual one."""
        found = self.chat_template
        if isinstance(found, str):
            return {"default": found}
        named = found if isinstance(found, list) else [found] if found else []
        return {entry.name: entry.template for entry in named}


class GenerationConfig(_JsonFile):
    """generation_config.json."""

    eos_token_id: _TokenId | list[_TokenId] | None = Field(None, description="a token id or a list of token ids")

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The model's end tokens."""
        found = self.eos_token_id
        return frozenset(found if isinstance(found, list) else [] if found is None else [found])


def read_json(path: Path) -> object:
    """The file's value. ArtifactError when it cannot be read."""
    return parsed_json(read_text(path), path)


def parsed_json(text: str, path: Path) -> object:
    """The value of the text of a file. ArtifactError when it is not JSON, or JSON that readers take differently."""
    try:
        value: object = parse_json(text, allow_nan=True)
    except ValueError as error:
        raise ArtifactError(f"{path} is not valid JSON ({error}); copy it again from the checkpoint") from error
    return value


def read_text(path: Path) -> str:
    """The file's text. ArtifactError when it cannot be read, is not UTF-8 or is larger than any tokenizer."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ArtifactError(f"{path} is larger than {_MAX_BYTES >> 20} MiB; it is not a file of a tokenizer")
        return content.decode()
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{path} is not UTF-8 text ({error}); copy it again from the checkpoint") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise ArtifactError(f"{path} cannot be read ({reason}); the tokenizer's folder must contain it") from error
