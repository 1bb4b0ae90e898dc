"""Norms, activations, stores and elementwise kernels of each instruction set: near float64, the same bits on all."""

from ctypes import POINTER, byref
from typing import Any

import numpy as np
import pytest

from ingot.artifact.programs.cpu_program import Activation
from ingot.artifact.programs.operation_row import Form
from ingot.errors import EngineError
from ingot.runtime.cpu.native.kernels import find_kernels
from ingot.runtime.cpu.native.structures import (
    CombineOperation,
    EmbedOperation,
    MatrixAt,
    NormalizeOperation,
    ViewAt,
)
from ingot.runtime.forward_batch import FloatArray
from tests.each_case import each_case
from tests.runtime.cpu.native.kernel_cases import (
    ACTIVATIONS,
    FORMS,
    INTEGERS,
    SETS,
    UNGATED,
    DoubleArray,
    LinearCase,
    Weight,
    activated,
    gated,
    needs_library,
    norm,
    norm_of,
    numbers_of,
    random_weight,
    view_of,
)

pytestmark = needs_library

KINDS = ("copy", "add", "multiply", "gate")


def floats(rng: np.random.Generator, *shape: int) -> FloatArray:
    return rng.standard_normal(shape, dtype=np.float32)


def identity(columns: int) -> Weight:
    """A float32 matrix that leaves rows as they are."""
    weight = random_weight(np.random.default_rng(0), columns, columns, "float32")
    weight.codes[:] = np.eye(columns, dtype=np.float32)
    weight.__post_init__()
    return weight


def identity_of_pairs(columns: int) -> Weight:
    """A matrix of pairs whose gate is the first half of a row, and its up projection the second."""
    weight = random_weight(np.random.default_rng(0), 2 * columns, 2 * columns, "float32", pairs=True)
    weight.codes[:] = np.eye(2 * columns, dtype=np.float32)
    weight.__post_init__()
    return weight


def combination(
    function: str, views: tuple[ViewAt, ViewAt, ViewAt], *, scale: float = 1.0, **facts: Any
) -> CombineOperation:
    """A combination of two views to a third."""
    a, b, output = views
    return CombineOperation(a=a, b=b, output=output, function=KINDS.index(function), scale=scale, **facts)


def combine(name: str, op: CombineOperation, rows: int) -> None:
    table = find_kernels(name)
    for row in range(rows):
        table.combine_row(byref(op), row, row)


def activate(name: str, x: FloatArray, activation: Activation, cap: float = 0.0) -> FloatArray:
    """The activation of a row, times 1, by one instruction set."""
    y: FloatArray = np.full((1, len(x)), np.nan, np.float32)
    op = combination(
        "gate",
        (view_of(x[None]), ViewAt(), view_of(y)),
        activation=ACTIVATIONS.index(activation),
        columns=len(x),
        number=1.0,
        cap=cap,
        numbers=numbers_of(activation),
    )
    combine(name, op, 1)
    return y.ravel()


def ulps(got: FloatArray, want: DoubleArray) -> DoubleArray:
    """Distance in units of the last place of `want`."""
    distance: DoubleArray = np.abs(got - want) / np.spacing(np.abs(want).astype(np.float32))
    return distance


ULPS: dict[Activation, float] = {
    "sigmoid": 3,
    "silu": 4,
    "tanh": 2,
    "gelu-erf": 6,
    "relu": 0,
    "relu2": 0.5,
    "softplus": 3,
    "clamp": 0,
    "none": 0,
}  # for |x| < 80


@each_case("activation", UNGATED)
def test_activations_are_within_a_few_ulps(activation: Activation) -> None:
    x = np.concatenate([np.linspace(-80, 80, 60001), np.linspace(-2, 2, 20001), [0.0, 1e-30, -1e-30]])
    x = x.astype(np.float32)
    want = activated(x.astype(np.float64), activation)
    reference = activate(SETS[0], x, activation)
    if activation in ("gelu-tanh", "xielu"):  # which have zeros that sums of larger terms make
        np.testing.assert_allclose(reference, want, rtol=3e-7, atol=3e-7)
    else:
        normal = (np.abs(want) > 1e-35) | (want == 0)
        assert ulps(reference, want)[normal].max() <= ULPS[activation]
        np.testing.assert_allclose(reference, want, rtol=1e-6, atol=1e-36)
    for name in SETS:
        assert activate(name, x, activation).tobytes() == reference.tobytes()


@each_case("activation", UNGATED)
def test_activations_of_extremes(activation: Activation) -> None:
    x = np.array([np.nan, 3e38, -3e38, 100.0, -100.0], np.float32)
    for name in SETS:
        got = activate(name, x, activation)
        assert np.isnan(got[0])
        with np.errstate(over="ignore"):
            want = activated(x[1:].astype(np.float64), activation).astype(np.float32)
        np.testing.assert_allclose(got[1:], want, rtol=1e-6, atol=1e-35)


def test_a_clamped_gate_by_rows_and_behind_a_matmul() -> None:
    """Gates and ups within and beyond the limit of 7, where both are clamped."""
    rng = np.random.default_rng(5)
    gate, up = 6 * floats(rng, 3, 40), 6 * floats(rng, 3, 40)
    want = gated(gate.astype(np.float64), up.astype(np.float64), "clamped-swiglu")
    pairs = LinearCase(identity_of_pairs(40), store="gate", activation="clamped-swiglu")
    rows = []
    for name in SETS:
        y = np.full((3, 40), np.nan, np.float32)
        views, numbers = (view_of(gate), view_of(up), view_of(y)), numbers_of("clamped-swiglu")
        op = combination("gate", views, activation=ACTIVATIONS.index("clamped-swiglu"), columns=40, numbers=numbers)
        combine(name, op, 3)
        np.testing.assert_allclose(y, want, rtol=2e-6, atol=1e-6)
        np.testing.assert_array_equal(pairs.run(name, np.concatenate((gate, up), axis=1)), y)
        rows.append(y.tobytes())
    assert len(set(rows)) == 1


def test_a_cap_bends_smoothly() -> None:
    x = np.linspace(-300, 300, 5001).astype(np.float32)
    for name in SETS:
        got = activate(name, x, "none", cap=30.0)
        np.testing.assert_allclose(got, 30 * np.tanh(x.astype(np.float64) / 30), rtol=4e-7)
        assert got.tobytes() == activate(SETS[0], x, "none", cap=30.0).tobytes()


@each_case("columns", [5, 64, 83])
@each_case("with_b", [True, False])
@each_case("kind", KINDS)
def test_combine(kind: str, with_b: bool, columns: int) -> None:
    rng = np.random.default_rng(columns)
    a, b = floats(rng, 3, columns), floats(rng, 3, columns)
    second = b.astype(np.float64) if with_b else np.full((3, columns), 0.75)
    f = {"copy": a, "add": a + second, "multiply": a * second, "gate": activated(a.astype(np.float64), "silu") * second}
    want = 5 * np.tanh(f[kind] * np.float64(1.5) / 5)
    results = []
    for name in SETS:
        y = np.full((3, columns + 3), np.nan, np.float32)
        views = view_of(a), view_of(b) if with_b else ViewAt(), view_of(y)
        silu = ACTIVATIONS.index("silu")
        op = combination(kind, views, activation=silu, columns=columns, number=0.75, scale=1.5, cap=5.0)
        combine(name, op, 3)
        np.testing.assert_allclose(y[:, :columns], want, rtol=2e-6, atol=1e-6)
        assert np.isnan(y[:, columns:]).all()
        results.append(y.tobytes())
    assert len(set(results)) == 1


def test_combine_in_place() -> None:
    rng = np.random.default_rng(0)
    a, b = floats(rng, 2, 40), floats(rng, 2, 40)
    for name in SETS:
        y = a.copy()
        op = combination("add", (view_of(y), view_of(b), view_of(y)), columns=40)
        combine(name, op, 2)
        np.testing.assert_array_equal(y, a + b)


@pytest.mark.parametrize("gathered", ["a", "b"])
def test_combine_gathers_rows(gathered: str) -> None:
    rng = np.random.default_rng(0)
    a, b = floats(rng, 4, 40), floats(rng, 4, 40)
    want = a[3] + b[1] if gathered == "a" else a[1] + b[3]
    for name in SETS:
        y = np.full((2, 40), np.nan, np.float32)
        views = view_of(a, gathered=gathered == "a"), view_of(b, gathered=gathered == "b"), view_of(y)
        op = combination("add", views, columns=40, rows=1)
        find_kernels(name).combine_row(byref(op), 3, 1)
        np.testing.assert_array_equal(y[1], want)
        assert np.isnan(y[0]).all()


@pytest.mark.parametrize(
    ("kind", "columns", "groups", "bias", "residual"),
    [
        ("rms", 64, 1, False, False),
        ("rms", 80, 4, False, True),
        ("layer", 40, 3, True, True),
        ("layer", 7, 2, True, False),
    ],
)
def test_normalize(kind: str, columns: int, groups: int, bias: bool, residual: bool) -> None:
    rng = np.random.default_rng(columns)
    x = floats(rng, 5, columns * groups) * 3 + 1
    weight, shift = floats(rng, columns), floats(rng, columns) if bias else None
    more = floats(rng, 5, columns * groups) if residual else None
    want = norm(x.reshape(-1, columns), kind, weight, shift).reshape(5, -1)[[3, 1]]
    want = want + more[:2] if more is not None else want
    results = []
    for name in SETS:
        y = np.full((2, columns * groups), np.nan, np.float32)
        views = {"input": view_of(x, gathered=True), "output": view_of(y), "residual": view_of(more)}
        own = norm_of(kind, weight, shift)
        op = NormalizeOperation(**views, norm=own, columns=columns, groups=groups, rows=1)
        table = find_kernels(name)
        table.normalize_row(byref(op), 3, 0)
        table.normalize_row(byref(op), 1, 1)
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=2e-6)
        results.append(y.tobytes())
    assert len(set(results)) == 1


def test_normalize_in_place_and_nan() -> None:
    rng = np.random.default_rng(0)
    x, weight = floats(rng, 2, 96), floats(rng, 96)
    want = norm(x, "rms", weight, None)
    for name in SETS:
        y = x.copy()
        y[1, 50] = np.nan
        op = NormalizeOperation(input=view_of(y), output=view_of(y), norm=norm_of("rms", weight), columns=96, groups=1)
        for row in range(2):
            find_kernels(name).normalize_row(byref(op), row, row)
        np.testing.assert_allclose(y[0], want[0], rtol=1e-5)
        assert np.isnan(y[1]).all()


@each_case("scale", [1.0, 2.5])
@each_case("form", FORMS)
@each_case(("block", "per_row", "zeros"), [(32, False, True), (48, False, False), (16, True, True)])
def test_embeddings(form: Form, block: int, per_row: bool, zeros: bool, scale: float) -> None:
    rng = np.random.default_rng(block)
    weight = random_weight(rng, 50, 91, form, block=block, per_row=per_row, zeros=zeros)
    matrix, y = weight.as_structure(), np.full((3, 96), np.nan, np.float32)
    op = EmbedOperation(table=POINTER(MatrixAt)(matrix), output=view_of(y), scale=scale)
    ids = (0, 17, 49)
    for name in SETS:
        for row, token in enumerate(ids):
            find_kernels(name).embed_row(byref(op), token, row)
        np.testing.assert_allclose(y[:, :91], weight.values[list(ids)] * scale, rtol=2e-7)
        assert np.isnan(y[:, 91:]).all()
        op.adds = 1
        find_kernels(name).embed_row(byref(op), 17, 1)
        np.testing.assert_allclose(y[1, :91], weight.values[17] * scale * 2, rtol=4e-7)
        op.adds = 0


@pytest.mark.parametrize("form", ["int4", "float16"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_before_the_matmul(form: Form, kind: str) -> None:
    rng = np.random.default_rng(1)
    weight = random_weight(rng, 33, 200, form)
    case = LinearCase(
        weight, "block" if form in INTEGERS else "none", norm=kind, norm_weight=floats(rng, 200),
        norm_bias=floats(rng, 200) if kind == "layer" else None,
    )  # fmt: skip
    x = floats(rng, 13, 200) * 4
    want, results = case.expected(x), [case.run(name, x) for name in SETS]
    # a code may round to its neighbour, as the norm's last bit differs
    np.testing.assert_allclose(results[0], want, atol=np.abs(want).max() * (1e-2 if form in INTEGERS else 1e-5))
    assert len({result.tobytes() for result in results}) == 1


@each_case("store", ["store", "add", "gate"])
@each_case("form", ["int4", "float32", "float16"])
@each_case("n", [20, 96])
def test_alpha_bias_cap_activation_and_store(form: Form, store: str, n: int) -> None:
    rng = np.random.default_rng(n)
    size = 2 * n if store == "gate" else n
    weight = random_weight(rng, size, 96, form, pairs=store == "gate")
    case = LinearCase(
        weight, "block" if form in INTEGERS else "none", store, "gelu-tanh", bias=floats(rng, size), alpha=0.5, cap=2.0
    )
    x = floats(rng, 14, 96)
    want = case.expected(x, 1.5)
    results = [case.run(name, x, 1.5) for name in SETS]
    np.testing.assert_allclose(results[0], want, rtol=1e-5, atol=1e-5)
    assert len({result.tobytes() for result in results}) == 1
    assert case.run(SETS[0], x[5:6], 1.5).tobytes() == results[0][5:6].tobytes()


def test_a_float_row_with_nan_stays_alone() -> None:
    case = LinearCase(identity(48), norm="rms", norm_weight=np.ones(48, np.float32))
    x = floats(np.random.default_rng(2), 15, 48)
    clean = case.run(SETS[0], x)
    x[7, 3] = np.nan
    for name in SETS:
        got = case.run(name, x)
        assert np.isnan(got[7]).all()
        np.testing.assert_array_equal(np.delete(got, 7, 0), np.delete(clean, 7, 0))


def test_an_unknown_instruction_set_has_no_table() -> None:
    assert "mmx" not in SETS
    with pytest.raises(EngineError, match="mmx"):
        find_kernels("mmx")


def test_combine_multiplies_all_columns_by_one() -> None:
    rng = np.random.default_rng(0)
    a, b = floats(rng, 3, 40), floats(rng, 3, 1)
    for name in SETS:
        y = np.full((3, 40), np.nan, np.float32)
        views = view_of(a), view_of(b), view_of(y)
        op = combination("multiply", views, columns=40, broadcast=1)
        combine(name, op, 3)
        np.testing.assert_array_equal(y, a * b)
