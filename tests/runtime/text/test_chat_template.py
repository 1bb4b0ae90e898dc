"""Chat templates: the environment of transformers, an adversary's templates, and error messages."""

import datetime
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from ingot.errors import ArtifactError, RequestError
from ingot.runtime.text.chat_template import MAX_PROMPT_CHARACTERS, ChatTemplate
from tests.data_paths import ROOT
from tests.each_case import each_case
from tests.runtime.text.hostile_templates import ALL as HOSTILE
from tests.runtime.text.model_templates import MODEL_TEMPLATES

MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi <b>&"}]


def render(source: str, messages: Any = MESSAGES, **variables: Any) -> str:
    return ChatTemplate(source, "chat_template.jinja", {"bos_token": "<s>"}).render(messages, **variables)


def test_messages_special_tokens_and_the_generation_prompt_are_variables() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m.content }}{% endfor %}{{ add_generation_prompt }}"
    )
    assert render(source) == "<s>[user]Hello[assistant]Hi <b>&True"
    assert render(source, add_generation_prompt=False).endswith("False")


CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
BEGUN = [{"role": "user", "content": "1 + 1 = 2?"}, {"role": "assistant", "content": " 2 "}]


@each_case(
    ("source", "prompt"),
    [
        (CHATML, "<user>1 + 1 = 2?</user><assistant> 2 "),
        (CHATML.replace("m.content", "m.content | trim"), "<user>1 + 1 = 2?</user><assistant>2"),
        (CHATML.replace("m.content", "m.content[0].text"), "<user>1 + 1 = 2?</user><assistant> 2 "),
    ],
)
def test_a_final_message_that_is_to_be_continued_has_no_end(source: str, prompt: str) -> None:
    messages: list[dict[str, Any]] = BEGUN
    if ".text" in source:
        messages = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in BEGUN]
    source += "{% if add_generation_prompt %}<assistant>{% endif %}"
    assert render(source, messages, continue_final_message=True) == prompt
    assert render(source, messages, continue_final_message=True, add_generation_prompt=False) == prompt


@each_case(
    ("given", "message"),
    [
        ({"add_generation_prompt": True}, "begins another message"),
        ({"messages": BEGUN[:1]}, "the last message must be the assistant's"),
        ({"messages": []}, "the last message must be the assistant's"),
        ({"messages": [{"role": "assistant", "content": None}]}, "with a text as its content"),
        ({"source": "{{ messages[0].content }}"}, "does not write the last message to its end"),
    ],
)
def test_what_cannot_be_continued_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        render(**{"source": CHATML, "messages": BEGUN, "continue_final_message": True, **given})
    assert refused.value.field == "continue_final_message"


def test_a_block_tag_removes_its_whole_line() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_tojson_does_not_escape_html() -> None:
    assert render("{{ messages[1].content | tojson }}") == '"Hi <b>&"'
    assert render("{{ 'é' | tojson }}") == '"é"'
    assert render("{{ {'b': 1, 'a': [1]} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": [\n  1\n ],\n "b": 1\n}'


def test_loop_controls_namespaces_and_the_generation_tag_work() -> None:
    assert (
        render("{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}")
        == "user"
    )
    assert render("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}") == "2"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "Hello!"
    assert render("{{ dict(a=1).a }}") == "1"


def test_strftime_now_is_todays_date() -> None:
    days = {datetime.datetime.now().strftime("%d %b %Y")}
    text = render("{{ strftime_now('%d %b %Y') }}")
    assert text in days | {datetime.datetime.now().strftime("%d %b %Y")}


def test_tools_documents_and_own_variables_reach_the_template() -> None:
    source = "{{ tools[0].name }} {{ documents[0].title }} {{ enable_thinking }}"
    text = render(source, tools=[{"name": "add"}], documents=[{"title": "T", "text": ""}], enable_thinking=False)
    assert text == "add T False"
    assert render("{{ tools is none }}{{ documents is none }}") == "TrueTrue"


def test_the_templates_own_error_reaches_the_caller() -> None:
    with pytest.raises(RequestError, match=r"jinja, line 1: .* refuses this conversation: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@each_case(
    "source",
    [
        "{{ messages[0].missing.deeper }}",
        "{{ messages[7].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ {}['a'] + 1 }}",
        "{{ messages | tojson(indent={}) }}",
    ],
)
def test_a_conversation_that_does_not_fit_the_template_is_refused(source: str) -> None:
    with pytest.raises(RequestError, match=r"chat_template\.jinja, line 1: the chat template cannot render this"):
        render(source)


@each_case(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set ns = namespace(__init__=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ dict.__class__.__mro__ }}",
        "{{ range(10**9) | list }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        render(source)


def test_a_broken_template_is_named_with_its_line() -> None:
    with pytest.raises(ArtifactError, match=r"chat_template\.jinja, line 2: the chat template is not valid jinja2"):
        ChatTemplate("a\n{% if %}", "chat_template.jinja")


@pytest.mark.parametrize("message", ["Hello", {"content": "x"}, {"role": 3}, None])
def test_a_message_without_a_role_is_refused_by_its_number(message: object) -> None:
    with pytest.raises(RequestError, match=r"message 1 is .*it must be a mapping such as"):
        render("", [MESSAGES[0], message])


def test_rendering_does_not_change_the_callers_messages() -> None:
    messages = [{"role": "user", "content": "Hi", "extra": ["a", {"type": "text"}]}]
    assert render("{{ messages[0].extra[1].type }}{{ messages[0].extra + ['b'] }}", messages).startswith("text")
    assert messages == [{"role": "user", "content": "Hi", "extra": ["a", {"type": "text"}]}]


def test_the_line_of_a_failure_is_that_of_the_template() -> None:
    source = "{% macro m(x) %}\n{{ x.a.b }}\n{% endmacro %}\n{% for i in [1] %}\n{{ m(i) }}\n{% endfor %}"
    with pytest.raises(RequestError, match=r"chat_template\.jinja, line 2: .*has no attribute 'a'"):
        render(source)


def test_a_long_message_of_a_template_is_shortened() -> None:
    with pytest.raises(RequestError) as caught:
        render("{{ raise_exception('a' * 9999) }}")
    assert len(str(caught.value)) < 500


def test_a_variable_with_a_reserved_name_is_refused() -> None:
    for name in ("loop", "self", "range", "caller", "no name"):
        with pytest.raises(RequestError, match=f"'{name}' cannot be a variable of a chat template; use another"):
            render("", **{name: 1})


def test_variables_are_plain_data() -> None:
    with pytest.raises(RequestError, match="the variable 'x' contains a object"):
        render("", x=object())
    with pytest.raises(
        RequestError, match=r"tools\[1\] is a function; it must be a mapping with the tool's JSON schema"
    ):
        render("", tools=[{}, render])
    with pytest.raises(RequestError, match="documents is a dict; it must be a list of mappings"):
        render("", documents={"title": "T"})


def test_parts_are_joined_for_a_template_that_reads_texts() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]}]
    assert render("{% for m in messages %}{{ m.role + m.content }}{% endfor %}", parts) == "userHello\nyou"
    assert render("{% for p in messages[0].content %}{{ p.text if p.text else p }}.{% endfor %}", parts) == "Hello.you."


def test_a_prompt_has_a_greatest_length() -> None:
    message = {"role": "user", "content": "a" * (MAX_PROMPT_CHARACTERS // 4)}
    source = "{% for i in range(9) %}{{ messages[0].content }}{% endfor %}"
    with pytest.raises(RequestError, match=f"the prompt has more than {MAX_PROMPT_CHARACTERS:,} characters"):
        render(source, [message])


def test_the_budget_grows_with_the_conversation() -> None:
    """A template that looks at the messages after each is too much for one message, and not for a long conversation."""
    pairs = "{% for m in messages %}{% for n in messages[loop.index:] %}{% if n.role == 'x' %}x{% endif %}{% endfor %}"
    assert render(pairs + "{% endfor %}", [{"role": "user", "content": "Hello"}] * 1000) == ""
    repeated = (
        "{% for i in range(1000) %}{% for j in range(1000) %}{% if j == 'x' %}x{% endif %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(RequestError, match="does more than it may: its loops"):
        render(repeated)


@pytest.fixture(scope="module")
def hostile_outcomes() -> dict[str, tuple[float, str]]:
    """What became of each hostile template, in processes with little time and memory."""
    command = [sys.executable, "-m", "tests.runtime.text.hostile_templates"]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True
    )
    outcomes: dict[str, tuple[float, str]] = json.loads(done.stdout)
    return outcomes


@each_case("name", HOSTILE)
def test_a_hostile_template_ends_with_one_message(hostile_outcomes: dict[str, tuple[float, str]], name: str) -> None:
    _, message = hostile_outcomes[name]
    assert message.startswith(("RequestError: chat_template.jinja, line ", "ArtifactError: chat_template.jinja, line "))
    assert len(message.splitlines()) == 1
    assert len(message) < 600


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2]}}}
SCHEMA = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["m", "km"]},
        "points": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}}},
    },
    "required": ["unit"],
}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.\nAlways.", "parameters": SCHEMA}}
DIALOGUE: list[dict[str, object]] = [
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": "  One & two? "},
    {"role": "assistant", "content": "<think>\nadd\n</think>\n\nCalling.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
    {"role": "assistant", "content": "Three."},
]
"""A conversation with everything; `parts` refuses the answer of a tool."""
EXPECTED = {
    "thinking": '<|im_start|>system\nBe <brief>.\n\n# Tools\n<tools>\n{"type": "function", "function": {"name": "add", '
    '"description": "Adds.\\nAlways.", "parameters": {"type": "object", "properties": {"unit": {"enum": ["m", "km"]}, '
    '"points": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}}}}, "required": '
    '["unit"]}}}\n</tools><|im_end|>\n<|im_start|>user\n  One & two? <|im_end|>\n<|im_start|>assistant\n<think>\nadd\n'
    '</think>\n\nCalling.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    "Three.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "types": f"<|start|>system<|message|>Knowledge: {datetime.datetime.now():%Y}\n// Adds.\n// Always.\n"
    'type add = (_: {\n    unit: "m" | "km",\n    points?: {\n      x?: number\n    }[]\n  }) => any;\n<|end|>'
    "<|start|>system<|message|>Be <brief>.<|end|><|start|>user<|message|>  One & two? <|end|>"
    "<|start|>assistant<|message|><think>\nadd\n</think>\n\nCalling.<|end|><|start|>tool<|message|>3<|end|>"
    "<|start|>assistant<|message|>Three.<|end|>",
    "parts": "<s><start_of_turn>user\nBe <brief>.\n\nOne & two?<end_of_turn>\n<start_of_turn>model\n"
    "<think>\nadd\n</think>\n\nCalling.<end_of_turn>\n<start_of_turn>model\n",
    "blocks": "<|system|>Today: 1 May 2026 /no_think BE &LT;BRIEF&GT;.<|end|>assistant=36;tool=1;user=13;"
    "<|user|>  One & two?<|assistant|><think>\nadd\n</think>\n\nCalling.<|assistant|>Three.",
}


@pytest.mark.parametrize("name", MODEL_TEMPLATES)
def test_a_template_in_the_manner_of_a_model_renders(name: str) -> None:
    template = ChatTemplate(MODEL_TEMPLATES[name], "chat_template.jinja", {"bos_token": "<s>"})
    messages = DIALOGUE[:3] if name == "parts" else DIALOGUE
    text = template.render(messages, tools=[TOOL], enable_thinking=False, date_string="1 May 2026")
    assert text == EXPECTED[name]
