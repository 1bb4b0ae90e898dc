"""Reply templates: the `response_template` of transformers 5.23's tokenizer_config.json, checked and compiled.

    {"start_anchor": "<|im_start|>assistant\\n",                    where the model's turn begins in the prompt
     "fields": {"reasoning_content": {"open": "<think>", "close": "</think>"},
                "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "repeats": true, "content": "json",
                               "transform": {"type": "function", "function": "{content}"}},
                "content": {}}}

A field owns regions of the text, from its opening to its closing delimiter: a text, one of several, or a regular
expression. The field without an opening owns what no other does. What a region holds is read by `contents`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

import regex
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ingot.errors import ArtifactError, shown
from ingot.runtime.replies.contents import ContentKind, check_transform

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_Literals = (
    Annotated[str, Field(min_length=1)] | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
)
_ADVICE = "correct response_template in tokenizer_config.json, or remove it"


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FieldSpec(_Spec):
    """One field of a template, as JSON has it."""

    open: _Literals | None = None
    open_pattern: str | None = None
    close: _Literals | None = None
    close_pattern: str | None = None
    content: ContentKind = "text"
    content_args: dict[str, Any] = {}
    repeats: bool = False
    join: str | None = None
    optional: bool = True
    transform: Any = None
    transform_each: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.open is not None and self.open_pattern is not None:
            raise ValueError("it has both open and open_pattern")
        if self.close is not None and self.close_pattern is not None:
            raise ValueError("it has both close and close_pattern")
        if self.transform_each and self.transform is None:
            raise ValueError("it has transform_each but no transform")
        check_transform(self.transform)
        return self


class TemplateSpec(_Spec):
    """A template, as JSON has it."""

    version: Literal[1] = 1
    defaults: dict[str, Any] = {}
    start_anchor: _Literals | None = None
    start_anchor_pattern: str | None = None
    fields: Annotated[dict[str, FieldSpec], Field(min_length=1)]


@dataclass(frozen=True)
class Delimiter:
    """A compiled delimiter. A complete match at the end of the text so far is final unless `may_grow`."""

    pattern: "regex.Pattern[str]"
    may_grow: bool

    @classmethod
    def of(cls, literals: str | list[str] | None, pattern: str | None) -> "Delimiter | None":
        """The delimiter of two fields of a specification; None without either."""
        if literals is not None:
            texts = sorted(
                {literals} if isinstance(literals, str) else set(literals), key=lambda text: (-len(text), text)
            )
            grows = any(one != other and one.startswith(other) for one in texts for other in texts)
            return cls(regex.compile("|".join(map(regex.escape, texts))), grows)
        if pattern is not None:
            return cls(regex.compile(pattern, regex.DOTALL), True)
        return None


@dataclass(frozen=True)
class ReplyField:
    """One field of a template."""

    name: str
    spec: FieldSpec
    opening: Delimiter | None
    closing: Delimiter | None


@dataclass(frozen=True)
class ReplyTemplate:
    """A compiled template. `default` is the field without an opening delimiter."""

    fields: Mapping[str, ReplyField]
    anchor: Delimiter | None
    source: Mapping[str, Any] = field(repr=False)

    @classmethod
    def load(cls, source: object) -> "ReplyTemplate":
        """Check and compile a template. ArtifactError names what is wrong with it."""
        try:
            spec = TemplateSpec.model_validate(source)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "it"
            raise ArtifactError(
                f"response_template: {place}: {first['msg']} ({shown(first['input'])}); {_ADVICE}"
            ) from error
        try:
            fields = {name: _compiled(name, each) for name, each in spec.fields.items()}
            anchor = Delimiter.of(spec.start_anchor, spec.start_anchor_pattern)
        except regex.error as error:
            raise ArtifactError(
                f"response_template: {shown(error.pattern)} is not a pattern ({error}); {_ADVICE}"
            ) from error
        if sum(each.opening is None for each in fields.values()) > 1:
            names = ", ".join(name for name, each in fields.items() if each.opening is None)
            raise ArtifactError(
                f"response_template: the fields {names} have no open; one may, and owns the rest; {_ADVICE}"
            )
        assert isinstance(source, Mapping)
        return cls(fields, anchor, source)

    @property
    def default(self) -> ReplyField | None:
        """The field that owns the text outside of all regions."""
        return next((each for each in self.fields.values() if each.opening is None), None)

    @property
    def reasoning(self) -> ReplyField | None:
        """The field that holds the model's reasoning."""
        return next((self.fields[name] for name in REASONING_FIELDS if name in self.fields), None)

    def without(self, name: str) -> "ReplyTemplate":
        """The template that leaves a field's regions in the text around them."""
        fields = {each: value for each, value in self.fields.items() if each != name}
        return ReplyTemplate(fields, self.anchor, self.source)

    def delimiters(self) -> str:
        """All delimiters in one text without escapes, to find the special tokens among them."""
        specs = [each.spec for each in self.fields.values()]
        found = [value for spec in specs for value in (spec.open, spec.open_pattern, spec.close, spec.close_pattern)]
        return str([value for value in found if value]).replace("\\", "")


def _compiled(name: str, spec: FieldSpec) -> ReplyField:
    return ReplyField(
        name, spec, Delimiter.of(spec.open, spec.open_pattern), Delimiter.of(spec.close, spec.close_pattern)
    )
