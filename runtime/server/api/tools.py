"""Fields of chats about tools: which functions there are, and whether the reply must call one."""

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from ingot.errors import shown, unknown
from ingot.runtime.server.http.api_error import ApiError

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_MOST_TOOLS = 128


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Function(_Part):
    """A function that the model may call. `strict` changes nothing: required calls always follow the schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Part):
    """A tool: a function."""

    type: Literal["function"]
    function: Function


class NamedFunction(_Part):
    """The name of a function."""

    name: str


class NamedTool(_Part):
    """The tool that the reply must call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(_Part):
    """Some of the tools, and whether the reply must call one of them."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedToolsChoice(_Part):
    """The tools that the reply may call."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice


class ChosenTools(NamedTuple):
    """The tools that a reply may call, in the form of chat templates.

    must_call   whether it is a call; `many_calls`: whether it may be several
    """

    tools: list[dict[str, Any]]
    must_call: bool = False
    many_calls: bool = True


def chosen_tools(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel_calls: bool | None = None
) -> ChosenTools:
    """The tools of a request by its tool_choice: a name is exactly one call, `required` at least one.

    `parallel_calls` false: at most one.

    ApiError for a choice without tools, for names that cannot be used and for an unknown tool.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, f"tool_choice is {_said(choice)}, but there are no tools", param="tool_choice")
        return ChosenTools([])
    if len(tools) > _MOST_TOOLS:
        raise ApiError(400, f"there are {len(tools)} tools; at most {_MOST_TOOLS} are allowed", param="tools")
    names = [tool.function.name for tool in tools]
    for name in names:
        if not _NAME.fullmatch(name) or names.count(name) > 1:
            allowed = "1 to 64 letters, digits, dots, dashes and underscores, and used once"
            raise ApiError(400, f"a tool has the name {shown(name)}; it must be {allowed}", param="tools")
    found = [tool.model_dump(exclude_none=True) for tool in tools]
    many = parallel_calls is not False
    match choice:
        case "none":
            return ChosenTools([])
        case NamedTool():
            return ChosenTools(_only([choice], found), must_call=True, many_calls=False)
        case AllowedToolsChoice():
            must_call = choice.allowed_tools.mode == "required"
            return ChosenTools(_only(choice.allowed_tools.tools, found), must_call, many)
        case _:
            return ChosenTools(found, choice == "required", many)


def _only(chosen: Sequence[NamedTool], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools with these names, in the order of `tools`. ApiError for an unknown one."""
    names = [tool["function"]["name"] for tool in tools]
    wanted = [tool.function.name for tool in chosen]
    for name in wanted:
        if name not in names:
            raise ApiError(400, f"tool_choice: {unknown('tool', name, names, 'tools')}", param="tool_choice")
    return [tool for tool in tools if tool["function"]["name"] in wanted]


def _said(choice: ToolChoice | None) -> str:
    match choice:
        case NamedTool():
            return shown(choice.function.name)
        case AllowedToolsChoice():
            return choice.type
        case _:
            return str(choice)
