"""The environment of templates: what can be called and reached, sizes of sources, and renderings in threads."""

from concurrent.futures import ThreadPoolExecutor

import jinja2
import pytest

from ingot.runtime.text.chat_template import ChatTemplate
from ingot.runtime.text.template_environment import MAX_SOURCE_CHARACTERS, BoundedEnvironment
from tests.runtime.text.rendering import rendered


@pytest.mark.parametrize("call", ["1()", "numbers()", "text()", "(range)(3).count.real()", "mapping.keys()()"])
def test_only_macros_methods_and_functions_can_be_called(call: str) -> None:
    with pytest.raises((jinja2.exceptions.SecurityError, jinja2.UndefinedError)):
        rendered(call)


def test_a_key_is_a_text_or_a_number() -> None:
    for expression in (
        "mapping[(1, 2)]",
        "mapping[numbers]",
        "{(1, 2): 3}",
        "mapping.get((1, 2))",
        "(1, 2) in mapping",
    ):
        with pytest.raises(TypeError, match="is used as a key; keys are texts and numbers"):
            rendered(expression)


def test_nothing_is_computed_while_compiling() -> None:
    BoundedEnvironment().from_string("{{ 'a' * 10**10 }}{{ 'a' | center(10**10) }}{% if 10**10**10 %}{% endif %}")


def test_a_long_source_is_refused() -> None:
    BoundedEnvironment().from_string("a" * MAX_SOURCE_CHARACTERS)
    with pytest.raises(jinja2.TemplateSyntaxError, match="it has 200,001 characters; at most 200,000"):
        BoundedEnvironment().from_string("a" * (MAX_SOURCE_CHARACTERS + 1))


def test_a_deep_source_is_refused_with_its_line() -> None:
    with pytest.raises(jinja2.TemplateSyntaxError, match="it is nested too deep") as caught:
        BoundedEnvironment().from_string("a\n{{ " + "(" * 5000)
    assert caught.value.lineno == 2


def test_renderings_in_threads_have_budgets_of_their_own() -> None:
    template = ChatTemplate("{% for i in range(50000) %}{{ messages[0].content }}{% endfor %}", "t")

    def lengths(content: str) -> int:
        return len(template.render([{"role": "user", "content": content}]))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lengths, ["a", "bc"] * 20)) == [50_000, 100_000] * 20
