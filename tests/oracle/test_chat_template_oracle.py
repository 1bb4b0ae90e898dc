"""Every published template of the test data renders as transformers renders it, and refuses what it refuses."""

from typing import Any

import jinja2
import pytest

from ingot.errors import RequestError
from ingot.runtime.text.chat_template import ChatTemplate
from tests.data_paths import shared_data
from tests.each_case import each_case
from tests.runtime.text.model_templates import MODEL_TEMPLATES

pytestmark = pytest.mark.oracle
transformers_chat = pytest.importorskip("transformers.utils.chat_template_utils")

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a place, é <b>.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "where"}},
            "required": ["place"],
        },
    },
}
CALL = {"type": "function", "id": "abcdef123", "function": {"name": "get_weather", "arguments": {"place": "Ulm"}}}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one question": {"messages": [{"role": "user", "content": "Hello, wörld <&>"}]},
    "system and answer": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "  Hi  "},
            {"role": "assistant", "content": "Yes.\n"},
            {"role": "user", "content": "And?"},
        ]
    },
    "no generation prompt": {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False},
    "tools": {"messages": [{"role": "user", "content": "Weather in Ulm?"}], "tools": [WEATHER]},
    "tool call and result": {
        "messages": [
            {"role": "user", "content": "Weather in Ulm?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "get_weather", "tool_call_id": "abcdef123", "content": "rain"},
        ],
        "tools": [WEATHER],
    },
    "documents": {
        "messages": [{"role": "user", "content": "What?"}],
        "documents": [{"title": "Ulm", "text": "A town."}],
    },
}
# These cannot do without tools or functions; they refuse a plain question, in transformers too.
FOR_TOOLS_ONLY = {
    "CohereForAI-c4ai-command-r-plus-tool_use.jinja",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja",
    "fireworks-ai-llama-3-firefunction-v2.jinja",
}


def template_names() -> list[str]:
    """Names of the published templates; none where the test data is missing, which skips the tests."""
    try:
        return sorted(path.name for path in shared_data("golden/chat-templates").glob("*.jinja"))
    except pytest.skip.Exception:
        return []


TEMPLATES = template_names()


def rendered_by_transformers(source: str, given: dict[str, Any]) -> str | None:
    """None where the template, or what it does with the conversation, raises."""
    given = {"add_generation_prompt": True, "tools": None, "documents": None, **given}
    messages = given.pop("messages")
    try:
        texts, _ = transformers_chat.render_jinja_template([messages], chat_template=source, **given, **SPECIAL)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError):
        return None
    text: str = texts[0]
    return text


@each_case("name", TEMPLATES)
@each_case("case", CONVERSATIONS)
def test_a_template_renders_as_in_transformers(name: str, case: str) -> None:
    source = shared_data(f"golden/chat-templates/{name}").read_text(encoding="utf-8")
    given = dict(CONVERSATIONS[case])
    expected = rendered_by_transformers(source, given)
    template = ChatTemplate(source, name, SPECIAL)
    if expected is None:
        with pytest.raises(RequestError, match="chat template"):
            template.render(given.pop("messages"), **given)
    else:
        assert template.render(given.pop("messages"), **given) == expected


@each_case("name", MODEL_TEMPLATES)
@each_case("case", CONVERSATIONS)
def test_a_template_in_the_manner_of_a_model_renders_as_in_transformers(name: str, case: str) -> None:
    given = dict(CONVERSATIONS[case])
    expected = rendered_by_transformers(MODEL_TEMPLATES[name], given)
    template = ChatTemplate(MODEL_TEMPLATES[name], name, SPECIAL)
    if expected is None:
        with pytest.raises(RequestError, match="chat template"):
            template.render(given.pop("messages"), **given)
    else:
        assert template.render(given.pop("messages"), **given) == expected


@each_case("name", [name for name in TEMPLATES if name not in FOR_TOOLS_ONLY])
def test_every_template_renders_a_simple_question(name: str) -> None:
    source = shared_data(f"golden/chat-templates/{name}").read_text(encoding="utf-8")
    assert "Hello" in ChatTemplate(source, name, SPECIAL).render([{"role": "user", "content": "Hello"}])
