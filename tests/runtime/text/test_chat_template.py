"""Chat templates: the environment of transformers, the sandbox, and error messages."""

import datetime
from typing import Any

import pytest

from ingot.errors import RequestError
from ingot.runtime.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi <b>&"}]


def render(source: str, messages: Any = MESSAGES, **variables: Any) -> str:
    return ChatTemplate(source, "chat_template.jinja", {"bos_token": "<s>"}).render(messages, **variables)


def test_messages_special_tokens_and_the_generation_prompt_are_variables() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m.content }}{% endfor %}{{ add_generation_prompt }}"
    )
    assert render(source) == "<s>[user]Hello[assistant]Hi <b>&True"
    assert render(source, add_generation_prompt=False).endswith("False")


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
    with pytest.raises(RequestError, match=r"chat_template\.jinja: .* refuses this conversation: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
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
    with pytest.raises(RequestError, match=r"chat_template\.jinja: the chat template"):
        render(source)


@pytest.mark.parametrize(
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
    with pytest.raises(RequestError, match=r"chat_template\.jinja, line 2: the chat template is not valid jinja2"):
        ChatTemplate("a\n{% if %}", "chat_template.jinja")


@pytest.mark.parametrize("message", ["Hello", {"content": "x"}, {"role": 3}, None])
def test_a_message_without_a_role_is_refused_by_its_number(message: object) -> None:
    with pytest.raises(RequestError, match=r"message 1 is .*it must be a mapping such as"):
        render("", [MESSAGES[0], message])


def test_only_plain_data_reaches_the_template() -> None:
    with pytest.raises(RequestError, match="message 0 contains a object"):
        render("{{ messages }}", [{"role": "user", "content": object()}])
    with pytest.raises(RequestError, match="tools contains a function"):
        render("", tools=[render])


def test_rendering_does_not_change_the_callers_messages() -> None:
    messages = [{"role": "user", "content": ["a", {"type": "text"}]}]
    assert render("{{ messages[0].content[1].type }}", messages) == "text"
    assert messages == [{"role": "user", "content": ["a", {"type": "text"}]}]
