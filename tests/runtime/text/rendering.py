"""Renders an expression within a budget, and as plain jinja2 does."""

from typing import Any

import jinja2.sandbox

from ingot.runtime.text.template_budget import RenderingBudget, limited
from ingot.runtime.text.template_environment import BoundedEnvironment

VARIABLES: dict[str, Any] = {
    "text": "Hello big  World,\nhello é <&>",
    "numbers": [3, 1, 2, 1],
    "words": ["b", "a", "B", "é"],
    "people": [{"name": "Ann", "age": 3}, {"name": "bob", "age": 1}, {"name": "Cy", "age": 3}],
    "mapping": {"b": 1, "a": [2, "x"]},
}


def rendered(expression: str, **variables: Any) -> str:
    """The text of an expression, by the bounded environment."""
    template = BoundedEnvironment().from_string(f"{{{{ {expression} }}}}")
    with limited(RenderingBudget(0, 0)):
        return "".join(template.root_render_func(template.new_context({**VARIABLES, **variables})))


def rendered_by_jinja(expression: str) -> str:
    """The text of an expression, by jinja2's sandbox."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment()
    return environment.from_string(f"{{{{ {expression} }}}}").render(VARIABLES)
