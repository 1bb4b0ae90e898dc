"""Rewriting a template's tree: what is refused, with its line, and payments in every body that may run again."""

import jinja2
import pytest
from jinja2 import nodes

from ingot.runtime.text import template_compiler
from ingot.runtime.text.template_compiler import PAY, PRIVATE_FILTERS, RefusedTemplateError
from ingot.runtime.text.template_environment import BoundedEnvironment
from tests.each_case import each_case


def parsed(source: str) -> nodes.Template:
    return BoundedEnvironment().parse(source)


@each_case(
    ("source", "message"),
    [
        ("{% include 'x' %}", "it uses 'include'; it reads another template"),
        ("{% block x %}{% endblock %}", "it uses 'block'"),
        ("{% autoescape true %}{% endautoescape %}", "it uses 'autoescape'"),
        ("{% break %}", "it has 'break' outside of a loop"),
        ("{% for i in x %}{% else %}{% break %}{% endfor %}", "it has 'break' outside of a loop"),
        ("{% for i in x %}{% macro m() %}{% continue %}{% endmacro %}{% endfor %}", "'continue' outside of a loop"),
        ("{{ 1 in x in y }}", "'in' within a chain"),
        ("{{ " + "9" * 100 + " }}", "a number that is too large"),
        ("{{ 1e999 }}", "a number that is too large"),
        ("{{ " + "x.a" + "()" * 100 + " }}", "nested more than 60 deep"),
        ("{% if x %}" * 20 + "{% endif %}" * 20, "blocks that are nested more than 16 deep"),
        ("{{ x }}" * 20_000, "more than 20,000 parts"),
    ],
    ids=lambda value: value[:40],
)
def test_what_no_template_may_do_is_refused_with_its_line(source: str, message: str) -> None:
    with pytest.raises(RefusedTemplateError, match=message) as caught:
        parsed(f"a\n\n{source}")
    assert caught.value.lineno == 3


def test_a_loop_in_the_else_of_a_loop_may_break_the_outer_one() -> None:
    source = "{% for i in [1, 2] %}{{ i }}{% for j in [] %}{% else %}{% break %}{% endfor %}{% endfor %}"
    assert nodes.Break in {type(node) for node in parsed(source).find_all(nodes.Node)}


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("{% for x in y %}{{ x }}{% endfor %}", nodes.For),
        ("{% for x in y %}{% endfor %}", nodes.For),
        ("{% macro m() %}{% endmacro %}", nodes.Macro),
        ("{% call m() %}{% endcall %}", nodes.CallBlock),
        ("x", nodes.Template),
    ],
)
def test_a_body_that_may_run_again_begins_with_a_payment(source: str, kind: type[nodes.For]) -> None:
    tree = parsed(source)
    node = tree if isinstance(tree, kind) else next(iter(tree.find_all(kind)))
    first = node.body[0]
    assert isinstance(first, nodes.ExprStmt)
    assert isinstance(first.node, nodes.Filter)
    assert first.node.name == PAY


def test_the_test_of_a_loop_pays() -> None:
    (loop,) = parsed("{% for x in y if x %}{% endfor %}").find_all(nodes.For)
    assert isinstance(loop.test, nodes.Filter)
    assert loop.test.name == PAY


def test_a_comparison_with_a_constant_is_free_and_any_other_pays() -> None:
    assert not private("{{ x == 'a' }}{{ 1 < x }}{{ x in ['a', 'b'] }}")
    assert private("{{ x == y }}") == private("{{ 'a' in x }}") == ["bounded compared"]
    assert private("{{ x < y < z }}") == ["bounded weighed"] * 3
    assert private("{{ x ~ 'a' }}{{ x[1:] }}{{ x(*y) }}{{ {x: 1} }}") == [
        *("bounded concatenated", "bounded sliced", "bounded unpacked", "bounded key")
    ]


def private(source: str) -> list[str]:
    """Names of the filters that the compiler inserted, without payments for bodies."""
    names = [node.name for node in parsed(source).find_all(nodes.Filter)]
    return [name for name in names if name in PRIVATE_FILTERS and name != PAY]


def test_every_kind_of_node_that_jinja_has_is_allowed_rewritten_or_refused() -> None:
    """A new version of jinja2 with a new kind of node refuses it until it is put into a table."""
    known = {*template_compiler._KINDS, *template_compiler._REFUSED}
    inserted_only = {nodes.ExprStmt}
    internal = {
        *(nodes.MarkSafe, nodes.MarkSafeIfAutoescape, nodes.EnvironmentAttribute, nodes.ExtensionAttribute),
        *(nodes.ImportedName, nodes.InternalName, nodes.ContextReference, nodes.DerivedContextReference),
        *(nodes.OverlayScope, nodes.EvalContextModifier),
    }
    abstract = {
        *(nodes.Node, nodes.Stmt, nodes.Helper, nodes.Expr, nodes.Literal, nodes.BinExpr, nodes.UnaryExpr),
        *(nodes._FilterTestCommon,),
    }
    kinds = {kind for kind in vars(nodes).values() if isinstance(kind, type) and issubclass(kind, nodes.Node)}
    assert kinds == known | inserted_only | internal | abstract


def test_private_filters_have_no_name_in_a_template() -> None:
    for name in PRIVATE_FILTERS:
        with pytest.raises(jinja2.TemplateSyntaxError):
            parsed(f"{{{{ x | {name} }}}}")
