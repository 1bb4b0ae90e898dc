"""Errors of the native CPU engine's kernels against float64, per kernel, type and instruction set of this machine.

    python -m benchmarks.cpu.kernel_errors [--output benchmarks/results/cpu/kernel-errors.json]

An error is |result - exact| / magnitude, in u = 2^-24, the unit roundoff of float32: one rounding to nearest is at most
1 u. The magnitude is the sum of the magnitudes of what is added to make the result (|x| . |w| of a matmul, the weighted
|v| of attention), or that of the exact result where nothing is added. Roundings that are the artifact's choice are not
counted: of weights, of activations before integer weights, of keys and values.

Exits with an error if a kernel is beyond its limit.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from ctypes import POINTER, byref
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from tests.runtime.cpu.native.attention_cases import ROUNDED, SHAPES, Case, exact, native_attention, run_alone
from tests.runtime.cpu.native.kernel_cases import (
    ACTIVATIONS,
    FORMS,
    INTEGERS,
    NUMBERS,
    SETS,
    UNGATED,
    DoubleArray,
    LinearCase,
    activated,
    norm,
    norm_of,
    numbers_of,
    random_weight,
    view_of,
)

import ingot
from benchmarks.device import device_facts
from benchmarks.paths import RESULTS
from ingot.artifact.programs.cpu_program import Activation, Rounding
from ingot.runtime.cpu.native.attention import isa_in_use, use_isa
from ingot.runtime.cpu.native.kernels import find_kernels
from ingot.runtime.cpu.native.program import program_library
from ingot.runtime.cpu.native.structures import CombineOperation, EmbedOperation, MatrixAt, NormalizeOperation
from ingot.runtime.forward_batch import FloatArray

OUTPUT = RESULTS / "cpu" / "kernel-errors.json"
UNIT = 2.0**-24
SMALLEST = 2.0**-126  # of the normal numbers: below, results are rounded to multiples of 2^-149
LIMITS = {
    "matmul": 8.0,
    "norm and matmul": 12.0,
    "norm": 8.0,
    "activation": 12.0,
    "elementwise": 12.0,
    "embedding": 2.0,
    "attention": 32.0,
}
COLUMNS = (576, 4096)
ROWS = 13  # one more than a tile of rows has
ATTENTION_SETS = ("avx512", "avx2", "baseline")  # those of them that this CPU has; of Arm the last
INTEGER_CASES: tuple[tuple[int, bool, Rounding], ...] = (
    (32, False, "block"),
    (128, False, "block"),
    (128, True, "token"),
)
"""Columns of a block, whether scales are per row instead, rounding of the activations."""


@dataclass(frozen=True)
class KernelError:
    """The largest error of a kernel's results on one case, in u."""

    kernel: str
    precision: str
    case: str
    isa: str
    error: float

    @property
    def limit(self) -> float:
        """The largest error that is allowed, in u."""
        return LIMITS[self.kernel]


@dataclass(frozen=True)
class Exact:
    """Results in float64, and their magnitudes; None: those of the results."""

    values: DoubleArray
    magnitudes: DoubleArray | None = None

    def error(self, got: FloatArray) -> float:
        """The largest error of these results, in u."""
        magnitudes = np.abs(self.values) if self.magnitudes is None else self.magnitudes
        return float((np.abs(got - self.values) / np.maximum(magnitudes, SMALLEST)).max() / UNIT)


def matmuls(columns: Sequence[int] = COLUMNS) -> Iterator[KernelError]:
    """Weights of every type; integers in blocks and per channel; a norm before the matmul."""
    rng = np.random.default_rng(0)
    for k in columns:
        x = _floats(rng, ROWS, k)
        for form in FORMS[: -len(INTEGERS)]:
            yield from _matmul("matmul", f"{k} columns", LinearCase(random_weight(rng, 32, k, form)), x)
        for form in INTEGERS:
            for block, per_row, rounding in INTEGER_CASES:
                weight = random_weight(rng, 32, k, form, block=block, per_row=per_row, zeros=True)
                scales = "per channel" if per_row else f"blocks of {block}"
                case = f"{k} columns, {scales}, activations per {rounding}"
                yield from _matmul("matmul", case, LinearCase(weight, rounding), x)
        for kind in ("rms", "layer"):
            bias = _floats(rng, k) if kind == "layer" else None
            linear = LinearCase(
                random_weight(rng, 32, k, "float16"), norm=kind, norm_weight=_floats(rng, k), norm_bias=bias
            )
            yield from _matmul("norm and matmul", f"{kind} of {k} columns", linear, x)


def _matmul(kernel: str, name: str, case: LinearCase, x: FloatArray) -> Iterator[KernelError]:
    want = Exact(case.expected(x), case.magnitudes(x))
    for isa in SETS:
        yield KernelError(kernel, case.weight.matrix.form, name, isa, want.error(case.run(isa, x)))


def norms() -> Iterator[KernelError]:
    """RMS and layer norms of rows, and of heads."""
    rng = np.random.default_rng(1)
    for kind in ("rms", "layer"):
        for columns, groups in ((576, 1), (4096, 1), (64, 9)):
            x, weight = _floats(rng, groups, columns) * 3 + 1, _floats(rng, columns)
            bias = _floats(rng, columns) if kind == "layer" else None
            want = Exact(norm(x, kind, weight, bias), _norm_magnitudes(x, weight, bias))
            for isa in SETS:
                y = np.zeros_like(x)
                views = {"input": view_of(x.reshape(1, -1)), "output": view_of(y.reshape(1, -1))}
                own = norm_of(kind, weight, bias)
                op = NormalizeOperation(**views, norm=own, columns=columns, groups=groups)
                find_kernels(isa).normalize_row(byref(op), 0, 0)
                yield KernelError("norm", "float32", f"{kind}, {groups} of {columns} columns", isa, want.error(y))


def _norm_magnitudes(x: FloatArray, weight: FloatArray, bias: FloatArray | None) -> DoubleArray | None:
    """Magnitudes of a layer norm's sums; of RMS, which adds nothing to a normed number, None."""
    if bias is None:
        return None
    wide = x.astype(np.float64)
    mean, deviation = wide.mean(axis=1, keepdims=True), wide.std(axis=1, keepdims=True)
    sums: DoubleArray = (np.abs(wide) + np.abs(mean)) / deviation * np.abs(weight) + np.abs(bias)
    return sums


def elementwise() -> Iterator[KernelError]:
    """Activations near zero, where they bend, and far from it; sums, multiplications, gates; a softcap."""
    for activation in UNGATED[1:]:
        for span in (2.0, 10.0):
            x = np.linspace(-span, span, 20_001, dtype=np.float32)[None]
            want = _exact_activation(activation, x.astype(np.float64))
            name = f"{activation}, -{span:g} to {span:g}"
            yield from _combine("activation", name, want, x, function="gate", activation=activation)
    rng = np.random.default_rng(2)
    a, b = _floats(rng, 1, 4096), _floats(rng, 1, 4096)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    total = Exact(wide_a + wide_b, np.abs(wide_a) + np.abs(wide_b))
    yield from _combine("elementwise", "a + b", total, a, b, function="add")
    yield from _combine("elementwise", "a * b", Exact(wide_a * wide_b), a, b, function="multiply")
    gate = Exact(activated(wide_a, "silu") * wide_b)
    yield from _combine("elementwise", "silu(a) * b", gate, a, b, function="gate", activation="silu")
    yield from _combine("elementwise", "5 tanh(a / 5)", Exact(5 * np.tanh(wide_a / 5)), a, function="copy", cap=5.0)


def _exact_activation(activation: Activation, x: DoubleArray) -> Exact:
    """Of gelu-tanh the magnitude is |x| / 2 * (1 + |tanh(...)|), as its definition adds tanh to 1."""
    y = activated(x, activation)
    if activation == "xielu":
        _, b, beta, eps = NUMBERS["xielu"]
        return Exact(y, np.where(x > 0, y, b * np.abs(np.expm1(np.minimum(x, eps)) - x) + beta * np.abs(x)))
    if activation != "gelu-tanh":
        return Exact(y)
    return Exact(y, np.abs(x) / 2 * (1 + np.abs(np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))))


def _combine(
    kernel: str, case: str, want: Exact, a: FloatArray, b: FloatArray | None = None, *,
    function: str, activation: Activation = "none", cap: float = 0.0,
) -> Iterator[KernelError]:  # fmt: skip
    """One row; without `b`, b is 1."""
    kind = ("copy", "add", "multiply", "gate").index(function)
    for isa in SETS:
        y = np.zeros_like(a)
        op = CombineOperation(
            a=view_of(a),
            b=view_of(b),
            output=view_of(y),
            function=kind,
            activation=ACTIVATIONS.index(activation),
            columns=a.shape[1],
            number=1.0,
            scale=1.0,
            cap=cap,
            numbers=numbers_of(activation),
        )
        find_kernels(isa).combine_row(byref(op), 0, 0)
        yield KernelError(kernel, "float32", case, isa, want.error(y))


def embeddings() -> Iterator[KernelError]:
    """A row of a table of each type, times 1.5."""
    rng = np.random.default_rng(3)
    for form in FORMS:
        weight = random_weight(rng, 32, 576, form, zeros=form in INTEGERS)
        matrix, want = weight.as_structure(), Exact(weight.values[[17]] * 1.5)
        for isa in SETS:
            y = np.zeros((1, 576), np.float32)
            op = EmbedOperation(table=POINTER(MatrixAt)(matrix), output=view_of(y), scale=1.5)
            find_kernels(isa).embed_row(byref(op), 17, 0)
            yield KernelError("embedding", form, "576 columns, scaled", isa, want.error(y))


def attentions(cases: Sequence[Case] = (*SHAPES, *ROUNDED)) -> Iterator[KernelError]:
    """Attention with its softmax and rotation, over keys and values of each type."""
    before = isa_in_use()
    wants = [[Exact(*exact(case, sequence)) for sequence in case.sequences] for case in cases]
    for isa in filter(use_isa, ATTENTION_SETS):
        for case, want in zip(cases, wants, strict=True):
            got = run_alone(case, native_attention(1)(case.pool()))
            error = max(one.error(rows) for one, rows in zip(want, got, strict=True))
            yield KernelError("attention", case.dtype, _shape(case), isa, error)
    use_isa(before)


def _shape(case: Case) -> str:
    extra = [f"{name} {value:g}" for name in ("window", "softcap", "rotary_dim") if (value := getattr(case, name))]
    group = f", groups of {case.int4_group}" if case.int4_group else ""
    heads = f"{case.heads} heads on {case.kv_heads} of {case.dim}{group}"
    return ", ".join((heads, f"up to {max(case.lengths)} tokens", *extra))


def _floats(rng: np.random.Generator, *shape: int) -> FloatArray:
    return rng.standard_normal(shape, dtype=np.float32)


def error_table(errors: Iterable[KernelError]) -> str:
    """The worst case of each kernel and type over all instruction sets, in Markdown."""
    worst: dict[tuple[str, str], KernelError] = {}
    for one in errors:
        key = one.kernel, one.precision
        worst[key] = max(worst.get(key, one), one, key=lambda found: found.error)
    lines = ["| kernel | type | error | limit | worst case |", "|---|---|---|---|---|"]
    lines += [
        f"| {one.kernel} | {one.precision} | {one.error:.2g} u | {one.limit:g} | {one.case} ({one.isa}) |"
        for one in worst.values()
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    output: Path = parser.parse_args().output
    program_library()  # an error where it was not built
    errors = [*matmuls(), *norms(), *elementwise(), *embeddings(), *attentions()]
    print(error_table(errors))
    report = {
        "device": device_facts(),
        "versions": {"ingot": ingot.__version__, "numpy": version("numpy")},
        "unit": UNIT,
        "errors": [{**asdict(one), "limit": one.limit} for one in errors],
    }
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if beyond := [one for one in errors if not one.error <= one.limit]:
        sys.exit(f"{len(beyond)} errors are beyond their kernel's limit, the first: {beyond[0]}")


if __name__ == "__main__":
    main()
