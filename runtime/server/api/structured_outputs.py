"""Fields of requests that constrain the output: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ingot.runtime.constraints.constraint import Constraint
from ingot.runtime.server.http.api_error import ApiError

REPLACED: Mapping[str, str] = {
    "guided_json": 'structured_outputs={"json": SCHEMA}',
    "guided_regex": 'structured_outputs={"regex": PATTERN}',
    "guided_choice": 'structured_outputs={"choice": [TEXT, ...]}',
    "guided_grammar": 'structured_outputs={"grammar": GRAMMAR}',
    "guided_json_object": 'structured_outputs={"json_object": true}',
    "guided_decoding_backend": "structured_outputs, which has one backend",
    "guided_whitespace_pattern": 'structured_outputs={"grammar": GRAMMAR}',
    "functions": "tools",
    "function_call": "tool_choice",
}
"""Fields that other servers had once, and what replaces them."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


class JsonSchema(_Part):
    """A schema with its name. `strict` changes nothing: a schema is always followed."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Part):
    """What the reply must be, in OpenAI's form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def constraint(self) -> Constraint | None:
        """The constraint; None for text."""
        if self.type == "json_object":
            return Constraint.json_object()
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise ApiError(400, "response_format has no json_schema.schema", param="response_format")
        return Constraint.json_schema(self.json_schema.schema_)


class StructuredOutputs(_Part):
    """What the text must be, in vLLM's form: one of these."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    @property
    def constraint(self) -> Constraint | None:
        """The constraint; None without one. ApiError for several."""
        found = [
            *([Constraint.json_schema(self.json_)] if self.json_ is not None else []),
            *([Constraint.json_object()] if self.json_object else []),
            *([Constraint.regex(self.regex)] if self.regex is not None else []),
            *([Constraint.choice(self.choice)] if self.choice is not None else []),
            *([Constraint.grammar(self.grammar)] if self.grammar is not None else []),
        ]
        if len(found) > 1:
            kinds = ", ".join(one.kind for one in found)
            raise ApiError(400, f"structured_outputs has {kinds}; give one of them", param="structured_outputs")
        return found[0] if found else None


def constraint_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> tuple[Constraint | None, str | None]:
    """The constraint of a request and the field that it is in. ApiError where both fields have one."""
    fields = {"response_format": response_format, "structured_outputs": structured_outputs}
    found = {name: one for name, part in fields.items() if part and (one := part.constraint)}
    if len(found) > 1:
        raise ApiError(400, "response_format and structured_outputs are given; leave one out", param="response_format")
    return next(((one, name) for name, one in found.items()), (None, None))
