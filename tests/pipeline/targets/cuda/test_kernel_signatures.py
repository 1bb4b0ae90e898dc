"""Signatures of the kernels: arguments in the functions' order, and refusals of unknown names and missing types."""

import ast

import pytest

from ingot.errors import UsageError
from ingot.pipeline.targets.cuda.kernel_signatures import SIGNATURES, make_kernel
from tests.data_paths import ROOT
from tests.each_case import each_case


@each_case("kernel", SIGNATURES)
def test_a_signature_lists_the_functions_arguments_in_order(kernel: str) -> None:
    module, _, name = SIGNATURES[kernel].function.partition(".")
    tree = ast.parse((ROOT / "kernels" / f"{module}.py").read_text(encoding="utf-8"))
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    assert list(SIGNATURES[kernel].arguments) == [arg.arg for arg in function.args.args if arg.annotation is None]


def test_an_unknown_kernel_and_a_missing_type_are_refused() -> None:
    with pytest.raises(UsageError, match=r"unknown kernel 'rms_nrm'.*Did you mean 'rms_norm'"):
        make_kernel("rms_nrm", {}, {})
    with pytest.raises(UsageError, match="gather_rows: types are missing for T"):
        make_kernel("gather_rows", {}, {})
