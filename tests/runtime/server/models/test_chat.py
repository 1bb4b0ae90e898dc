"""Plans of replies: reasoning only where the model has it, and exactly as many calls as tool_choice says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

from ingot.runtime.constraints import Constraint
from ingot.runtime.server.api.request_schemas import ChatRequest
from ingot.runtime.server.api.responses.schemas import ResponseRequest
from ingot.runtime.server.models.chat import Chat, ModelReplies, ReplyPlan
from ingot.runtime.text.tokenizer import Tokenizer
from tests.data_paths import DEMO_MODEL
from tests.each_case import each_case
from tests.runtime.constraints.grammars import END, allowed, matcher
from tests.runtime.engines import demo_tokenizer

TURN = "<|im_start|>assistant\n"
HERMES, THINKING = "{# <tool_call> #}", "{# <tool_call> <think> </think> #}"
FORMATS = (
    HERMES,
    "{# [TOOL_CALLS] #}",
    "{# <|python_tag|> #}",
    "{# <tool_call> <function= #}",
    "{# [TOOL_CALLS] [ARGS] #}",
)
TOOLS: list[Any] = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("f", "g")]
NAMED = {"type": "function", "function": {"name": "g"}}
CHOICE = Constraint.choice(["yes", "<think>no"])
Replies = Callable[..., ModelReplies]


@pytest.fixture
def replies(tmp_path: Path) -> Replies:
    def made(template: str, **config: object) -> ModelReplies:
        (tmp_path / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
        (tmp_path / "chat_template.jinja").write_text(template)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return ModelReplies(Tokenizer.load(tmp_path))

    return made


def plan(replies: ModelReplies, prompt: str, **given: Any) -> ReplyPlan:
    options: dict[str, Any] = {"tools": (), "must_call": False, "many_calls": True, "answer": None, **given}
    return replies.plan(demo_tokenizer().encode(prompt, add_special_tokens=False), **options)


def is_whole(plan: ReplyPlan, text: str) -> bool:
    """Whether the reply may be this text."""
    assert plan.constraint
    following, ids = matcher(plan.constraint), demo_tokenizer().encode(text, add_special_tokens=False)
    if following.num_allowed(ids) < len(ids):
        return False
    for token in ids:
        following.consume(token)
    return following.is_complete or END in allowed(following.mask())


def read(plan: ReplyPlan, text: str) -> tuple[str, str, list[str]]:
    """Content, reasoning and names of calls."""
    reader = plan.reader()
    if reader is None:
        return text, "", []
    message = reader.read(text, is_last=True)
    return message.content, message.reasoning, [call["function"]["name"] for call in message.calls]


@each_case(
    ("template", "prompt", "may_reason", "text", "is_allowed"),
    [
        (HERMES, TURN, True, "yes", True),
        (HERMES, TURN, True, "<think>so</think>yes", False),
        (THINKING, TURN, True, "<think>so</think>\n\nyes", True),
        (THINKING, TURN, True, "yes", True),
        (THINKING, TURN, False, "yes", True),
        (THINKING, TURN, False, "<think>so</think>yes", False),
        # The template has closed it, as Qwen 3 does where enable_thinking is false.
        (THINKING, f"{TURN}<think>\n\n</think>\n\n", True, "yes", True),
        (THINKING, f"{TURN}<think>\n\n</think>\n\n", True, "<think>so</think>yes", False),
        # The template has opened it.
        (THINKING, f"{TURN}<think>\n", True, "so</think>yes", True),
        (THINKING, f"{TURN}<think>\n", True, "yes", False),
        (THINKING, f"{TURN}<think>\n", False, "so</think>yes", False),
        (THINKING, f"{TURN}<think>\n", False, "</think>yes", True),
        # A message that the reply continues has opened it.
        (HERMES, f"{TURN}<think>", True, "so</think>yes", True),
    ],
)
def test_an_answer_follows_reasoning_only_where_the_model_has_it_and_the_request_allows_it(
    replies: Replies, template: str, prompt: str, may_reason: bool, text: str, is_allowed: bool
) -> None:
    planned = plan(replies(template), prompt, answer=CHOICE, may_reason=may_reason)
    assert is_whole(planned, text) == is_allowed
    if is_allowed:
        assert read(planned, text) == ("yes", "so" if "so" in text else "", [])


@each_case("may_reason", [True, False])
def test_what_an_answer_contains_is_no_reasoning_where_there_is_none(replies: Replies, may_reason: bool) -> None:
    planned = plan(replies(THINKING if not may_reason else HERMES), TURN, answer=CHOICE, may_reason=may_reason)
    assert is_whole(planned, "<think>no")
    assert read(planned, "<think>no") == ("<think>no", "", [])
    called = plan(replies(HERMES), TURN, answer=CHOICE, tools=TOOLS, may_reason=may_reason)
    assert read(called, "<think>no") == ("<think>no", "", [])


def test_a_template_of_the_artifact_says_whether_there_is_reasoning(replies: Replies) -> None:
    fields = {"content": {}, "reasoning_content": {"open": "{", "close": "}"}}
    own = replies(HERMES, response_template={"fields": fields})
    planned = plan(own, TURN, answer=CHOICE)
    assert is_whole(planned, "{so}yes")
    assert read(planned, "{so}yes") == ("yes", "so", [])
    assert not is_whole(
        plan(replies(THINKING, response_template={"fields": {"content": {}}}), TURN, answer=CHOICE), "<think>"
    )
    required = plan(own, TURN, tools=TOOLS, must_call=True)
    assert read(required, '{so}[{"name": "f", "arguments": {}}]') == ("", "so", ["f"])


def test_what_the_prompt_has_after_its_anchor_is_no_part_of_a_required_call(replies: Replies) -> None:
    for template in ("{# plain #}", *FORMATS):
        planned = plan(replies(template), f"{TURN}>>>", tools=TOOLS, must_call=True)
        assert read(planned, calls(template, "g")) == ("", "", ["g"])


@each_case(
    ("fields", "may_reason"),
    [
        ({}, True),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"thinking": False}}, False),
    ],
)
def test_a_field_of_the_request_turns_reasoning_off(fields: dict[str, Any], may_reason: bool) -> None:
    chat = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}).chat
    assert chat.may_reason == may_reason


def call(template: str, name: str) -> str:
    """A call as the format of a chat template spells it, without what is around a list of them."""
    key = "parameters" if "python_tag" in template else "arguments"
    return json.dumps({"name": name, key: {}})


def calls(template: str, *names: str) -> str:
    """A reply of calls."""
    each = [call(template, name) for name in names]
    if template == HERMES:
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in each)
    if "python_tag" in template:
        return "".join(each)
    opening = "[TOOL_CALLS][" if template == FORMATS[1] else "["
    return f"{opening}{', '.join(each)}]"


@each_case("template", FORMATS)
@each_case(
    ("fields", "counts"),
    [
        ({"tool_choice": NAMED}, {1}),
        ({"tool_choice": NAMED, "parallel_tool_calls": True}, {1}),
        ({"tool_choice": "required"}, {1, 2, 3}),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {1}),
    ],
)
def test_a_reply_has_as_many_calls_as_tool_choice_says(
    replies: Replies, template: str, fields: dict[str, Any], counts: set[int]
) -> None:
    counts = counts & {1} if "python_tag" in template else counts  # that format spells one call
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **fields}
    chats = [ChatRequest.model_validate(body).chat, response_chat(fields)]
    for chat in chats:
        planned = plan(replies(template), TURN, tools=chat.tools, must_call=chat.must_call, many_calls=chat.many_calls)
        texts = {count: calls(template, *["g"] * count) for count in range(4)}
        assert {count for count, text in texts.items() if is_whole(planned, text)} == counts
        for count in counts - {1} | {1}:
            assert read(planned, texts[count])[2] == ["g"] * count
        assert is_whole(planned, calls(template, "f")) == (fields["tool_choice"] == "required")


def response_chat(fields: dict[str, Any]) -> Chat:
    """The same choice in the form of /v1/responses."""
    choice = fields["tool_choice"]
    named = {"type": "function", "name": "g"} if isinstance(choice, dict) else choice
    tools = [{"type": "function", **each["function"]} for each in TOOLS]
    request = ResponseRequest.model_validate(
        {"model": "m", "input": "x", "tools": tools, **fields, "tool_choice": named}
    )
    return request.chat(request.conversation(()))
