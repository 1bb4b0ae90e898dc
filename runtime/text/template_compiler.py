"""Compiles a chat template so that nothing in it runs unpaid.

The template is parsed by jinja2, its tree is checked and rewritten here, and jinja2 compiles the tree. Every kind of
node is in one of the tables below: allowed as it is (its time is constant, and paid for by the body that it is in),
replaced by a call that pays for its operands, or refused. A body that may run more than once (of a loop, a macro, a
call block) begins with a payment for its own nodes.

    for x in xs if test: body   ->   for x in xs if pay(test, cost): pay(none, cost) body
    a ~ b                       ->   concatenated((a, b))
    a in b                      ->   compared(a, "in", b)
    a[b:c]                      ->   sliced(a, b, c, none)
    f(*args)                    ->   f(*unpacked(args))
    {key: value}                ->   {checked_key(key): value}

Operators, attributes, items and calls are intercepted by the environment (template_environment.py) through jinja2's
sandbox.
"""

from math import isfinite
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from ingot.runtime.text.template_budget import MAX_INTEGER_BITS, NODE_UNITS

MAX_NODES = 20_000
_MAX_EXPRESSION_DEPTH = 60  # CPython allows 200 nested brackets
_MAX_BLOCK_DEPTH = 16  # and 20 nested blocks

PAY, CONCATENATE, COMPARE, WEIGH, SLICE, UNPACK, KEY = PRIVATE_FILTERS = tuple(
    # A name in a template has no space, so these are out of its reach.
    f"bounded {name}"
    for name in ("pay", "concatenated", "compared", "weighed", "sliced", "unpacked", "key")
)

_ALLOWED: tuple[type[nodes.Node], ...] = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.Assign, nodes.AssignBlock, nodes.FilterBlock),
    *(
        nodes.Scope,
        nodes.With,
        nodes.Name,
        nodes.NSRef,
        nodes.Const,
        nodes.Tuple,
        nodes.List,
        nodes.Pair,
        nodes.Keyword,
    ),
    *(nodes.CondExpr, nodes.Getattr, nodes.Slice, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Pos),
    *(nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow),  # intercepted
)
_REWRITTEN: tuple[type[nodes.Node], ...] = (
    *(nodes.For, nodes.Macro, nodes.CallBlock, nodes.Break, nodes.Continue),
    *(nodes.Concat, nodes.Compare, nodes.Getitem, nodes.Dict, nodes.Call, nodes.Filter, nodes.Test),
)
_REFUSED: dict[type[nodes.Node], str] = {
    nodes.Block: "'block'; it belongs to inheritance between templates",
    nodes.Extends: "'extends'; it reads another template",
    nodes.FromImport: "'import'; it reads another template",
    nodes.Import: "'import'; it reads another template",
    nodes.Include: "'include'; it reads another template",
    nodes.ScopedEvalContextModifier: "'autoescape'; a prompt is not HTML",
}
_KINDS = frozenset((*_ALLOWED, *_REWRITTEN))


class RefusedTemplateError(jinja2.TemplateSyntaxError):
    """A valid template that no model may have."""


def bound(template: nodes.Template, environment: jinja2.Environment) -> nodes.Template:
    """The template with payments. Raises RefusedTemplateError, with the line, for what no chat template may do."""
    visitor = _Bounder(environment)
    visitor.visit(template)
    template.body.insert(0, visitor.payment(visitor.units, template.lineno))
    return template


class _Bounder(NodeTransformer):
    """Rewrites a tree in place. `units` is the cost of the nodes of the body that is being visited."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self.units = 0
        self._environment = environment
        self._num_nodes = 0
        self._line = 1  # of the last node that has one
        self._expression_depth = 0
        self._block_depth = 0
        self._loops = 0  # around this node, in the same function

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Check the node, count it, and replace it where it must pay."""
        self._check(node)
        self.units += NODE_UNITS
        if isinstance(node, nodes.TemplateData):
            self.units += 8 * len(node.data)
        is_expression, is_statement = isinstance(node, nodes.Expr), isinstance(node, nodes.Stmt)
        self._expression_depth += is_expression
        self._block_depth += is_statement
        result = super().visit(node, *args, **kwargs)
        self._expression_depth -= is_expression
        self._block_depth -= is_statement
        return result

    def _check(self, node: nodes.Node) -> None:
        if type(node) not in _KINDS:
            self._refuse(node, f"it uses {_REFUSED.get(type(node), type(node).__name__)}")
        self._num_nodes += 1
        self._line = node.lineno or self._line
        if isinstance(node, nodes.Const) and _is_too_large(node.value):
            self._refuse(node, "it contains a number that is too large")
        if self._num_nodes > MAX_NODES:
            self._refuse(node, f"it has more than {MAX_NODES:,} parts")
        if self._expression_depth > _MAX_EXPRESSION_DEPTH:
            self._refuse(node, f"it has an expression that is nested more than {_MAX_EXPRESSION_DEPTH} deep")
        if self._block_depth > _MAX_BLOCK_DEPTH:
            self._refuse(node, f"it has blocks that are nested more than {_MAX_BLOCK_DEPTH} deep")

    def _refuse(self, node: nodes.Node, message: str) -> NoReturn:
        raise RefusedTemplateError(message, node.lineno or self._line)

    def payment(self, units: int, line: int) -> nodes.Stmt:
        """A statement that pays."""
        paid = self._paying(PAY, self._constant(None, line), line, self._constant(units, line))
        return nodes.ExprStmt(paid, lineno=line, environment=self._environment)

    def _paying(self, name: str, value: nodes.Expr, line: int, *arguments: nodes.Expr) -> nodes.Filter:
        """The value through one of the private filters."""
        place = {"lineno": line, "environment": self._environment}
        return nodes.Filter(value, name, list(arguments), [], None, None, **place)

    def _constant(self, value: object, line: int) -> nodes.Const:
        return nodes.Const(value, lineno=line, environment=self._environment)

    def _visit_body(self, body: list[nodes.Node], *, loops: int) -> list[nodes.Node]:
        """Visit a body that may run many times; it begins with its own payment."""
        outer, self.units = (self.units, self._loops), 0
        self._loops = loops
        line = body[0].lineno if body else 1
        visited = [self.visit(node) for node in body]
        payment, (self.units, self._loops) = self.payment(self.units + NODE_UNITS, line), outer
        return [payment, *visited]

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (jinja2 names it so)
        node.iter = self.visit(node.iter)
        node.target = self.visit(node.target)
        if node.test:
            outer, self.units = self.units, 0
            tested = self.visit(node.test)
            node.test = self._paying(PAY, tested, node.lineno, self._constant(self.units + 2 * NODE_UNITS, node.lineno))
            self.units = outer
        node.body = self._visit_body(node.body, loops=self._loops + 1)
        outer_loops, self._loops = self._loops, 0 if node.recursive else self._loops
        node.else_ = [self.visit(child) for child in node.else_]
        self._loops = outer_loops
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._function(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        node.call = self.visit(node.call)
        return self._function(node)

    def _function(self, node: Any) -> nodes.Node:
        before = self.units
        node.args = [self.visit(child) for child in node.args]
        node.defaults = [self.visit(child) for child in node.defaults]
        of_defaults = self.units - before
        node.body = self._visit_body(node.body, loops=0)
        payment = node.body[0].node.args[0]
        payment.value += of_defaults
        return node  # type: ignore[no-any-return]

    def visit_Break(self, node: nodes.Stmt) -> nodes.Node:  # noqa: N802
        return self._in_a_loop(node, "break")

    def visit_Continue(self, node: nodes.Stmt) -> nodes.Node:  # noqa: N802
        return self._in_a_loop(node, "continue")

    def _in_a_loop(self, node: nodes.Stmt, word: str) -> nodes.Node:
        if not self._loops:
            self._refuse(node, f"it has '{word}' outside of a loop")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        values = nodes.Tuple(node.nodes, "load", lineno=node.lineno, environment=self._environment)
        return self._paying(CONCATENATE, values, node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if len(node.ops) == 1:
            return self._compare_two(node)
        for operand in node.ops:
            if operand.op in ("in", "notin"):
                self._refuse(node, "it has 'in' within a chain of comparisons; write 'and' between them")
            operand.expr = self._paying(WEIGH, operand.expr, node.lineno)
        node.expr = self._paying(WEIGH, node.expr, node.lineno)
        return node

    def _compare_two(self, node: nodes.Compare) -> nodes.Node:
        left, symbol, right = node.expr, node.ops[0].op, node.ops[0].expr
        is_search = symbol in ("in", "notin")
        if isinstance(right, nodes.Const) or (isinstance(left, nodes.Const) and not is_search) or _is_constant(right):
            return node  # as long as the constant, at most
        return self._paying(COMPARE, left, node.lineno, self._constant(symbol, node.lineno), right)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node  # intercepted
        none = self._constant(None, node.lineno)
        bounds = [part or none for part in (node.arg.start, node.arg.stop, node.arg.step)]
        return self._paying(SLICE, node.node, node.lineno, *bounds)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        for pair in node.items:
            if not isinstance(pair.key, nodes.Const):
                pair.key = self._paying(KEY, pair.key, node.lineno)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:  # noqa: N802
        return self._with_arguments(node)  # intercepted

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802
        return self._with_arguments(node)  # paid for by the filter

    def visit_Test(self, node: nodes.Test) -> nodes.Node:  # noqa: N802
        return self._with_arguments(node)

    def _with_arguments(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        for field in ("dyn_args", "dyn_kwargs"):
            if getattr(node, field) is not None:
                setattr(node, field, self._paying(UNPACK, getattr(node, field), node.lineno))
        return node  # type: ignore[no-any-return]


def _is_too_large(value: object) -> bool:
    if isinstance(value, float):
        return not isfinite(value)
    return isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS


def _is_constant(node: nodes.Expr) -> bool:
    """Whether this is a list of constants, as in `role in ["user", "system"]`."""
    return isinstance(node, nodes.List | nodes.Tuple) and all(isinstance(item, nodes.Const) for item in node.items)
