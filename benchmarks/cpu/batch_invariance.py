"""Check batch invariance of every form of matmul that the CPU lowering makes: does a row depend on other rows?

Each form multiplies 512 random rows at once, with one thread. Then it multiplies slices of them, of every size in
COUNTS, from two places, with one and two threads; a row with other bits is a difference. Prints a Markdown table.
Nothing is timed, so the machine may be busy:

    python -m benchmarks.cpu.batch_invariance
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxruntime  # type: ignore[import-untyped]

from ingot.passes.manager import PassManager
from ingot.passes.numerics.activation_rounding import ActivationScheme
from ingot.passes.quantization.activation_nodes import insert_activation_quantization
from ingot.passes.registry import make_pass

COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 64, 100, 101, 128, 257, 511, 512)
SHAPES = ((256, 256), (256, 172), (768, 2816))  # [out, in]; 172: the last block is partial
ROWS = 512
STATIC_SCALE = 0.03  # of int8 and float8 inputs that are normally distributed


@dataclass(frozen=True)
class Form:
    """A form of matmul. bits 32: Gemm in float32, other fields unused. activations: how inputs are quantized."""

    bits: int
    block_size: int
    symmetric: bool
    accuracy_level: int
    activations: ActivationScheme | None = None

    def passes(self) -> list[tuple[str, dict[str, object]]]:
        """Names and options of the passes that make this form of a Gemm."""
        lowering: tuple[str, dict[str, object]] = ("lower-onnxruntime-cpu", {"accuracy_level": self.accuracy_level})
        scheme: dict[str, object] = {
            "bits": self.bits,
            "block_size": self.block_size,
            "symmetric": self.symmetric,
            "lm_head": self.bits,
            "clip": False,
        }
        return [lowering] if self.bits == 32 else [("quantize-weights", scheme), lowering]


@dataclass(frozen=True)
class Outcome:
    """Counts at which a row differed, whether only last rows did, and the largest difference over the largest |y|."""

    counts: tuple[int, ...]
    only_last: bool
    difference: float


def forms() -> Iterator[Form]:
    """All forms except 8 bits with float32 activations, which are too slow to be used."""
    yield Form(32, 0, False, 0)
    for bits, level in ((2, 4), (4, 4), (8, 4), (2, 0), (4, 0)):
        for block_size in (16, 32, 64, 128, 256):
            for symmetric in (True, False):
                yield Form(bits, block_size, symmetric, level)
    for scale in (None, STATIC_SCALE):
        yield Form(32, 0, False, 0, ActivationScheme("float", scale))
        for symmetric in (True, False):
            yield Form(8, 0, symmetric, 4, ActivationScheme("int", scale))


def matmul(form: Form, out_features: int, in_features: int) -> ir.Model:
    """One linear layer of that form, from x [T, in] to y [T, out]."""
    weight = np.random.default_rng(0).standard_normal((out_features, in_features)).astype(np.float32)
    values = {
        name: ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
        for name, shape in (("x", ("T", in_features)), ("y", ("T", out_features)), ("w", weight.shape))
    }
    values["w"].const_value = ir.Tensor(weight, name="w")
    gemm = ir.node("Gemm", [values["x"], values["w"]], {"transB": 1}, name="linear", outputs=[values["y"]])
    opsets = {"": 24, "com.microsoft": 1}
    graph = ir.Graph(
        [values["x"]], [values["y"]], nodes=[gemm], initializers=[values["w"]], opset_imports=opsets, name="one"
    )
    model = ir.Model(graph, ir_version=11)
    if form.activations:
        insert_activation_quantization(graph, values["x"], [gemm], form.activations)
    PassManager([make_pass(name, options) for name, options in form.passes()]).run(model)
    return model


def session(model: ir.Model, num_threads: int) -> onnxruntime.InferenceSession:
    """A session whose idle threads do not spin."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)


def probe(form: Form) -> Outcome:
    """Compare every slice with the whole, over all shapes."""
    counts: set[int] = set()
    only_last, difference = True, 0.0
    for out_features, in_features in SHAPES:
        model = matmul(form, out_features, in_features)
        rows = np.random.default_rng(1).standard_normal((ROWS, in_features)).astype(np.float32)
        runners = [session(model, num_threads) for num_threads in (1, 2)]
        whole = runners[0].run(None, {"x": rows})[0]
        for runner in runners:
            for part in _parts():
                gap = np.abs(runner.run(None, {"x": rows[part]})[0] - whole[part]).max(axis=1)  # [rows of the slice]
                if gap.any():
                    counts.add(len(gap))
                    only_last &= not gap[:-1].any()
                    difference = max(difference, float(gap.max() / np.abs(whole).max()))
    return Outcome(tuple(sorted(counts)), only_last, difference)


def _parts() -> Iterator[slice]:
    for count in COUNTS:
        for start in {0, (ROWS - count) // 2}:
            yield slice(start, start + count)


def padding_needed(counts: tuple[int, ...]) -> str:
    """The smallest number to whose multiples rows must be padded for equal bits."""
    steps = (step for step in (1, 2, 4, 8, 16) if not any(count % step == 0 for count in counts))
    return str(next(steps, "none helps"))


def _inputs(scheme: ActivationScheme | None) -> str:
    """A description of quantized inputs."""
    return f", {scheme.kind}8 inputs, {'dynamic' if scheme.dynamic else 'static'}" if scheme else ""


def main() -> None:
    """Print one line per form."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| weights | block | zero point | accuracy_level | pad rows to | counts that differ | largest difference |")
    print("|---|---|---|---|---|---|---|")
    for form in forms():
        found = probe(form)
        quantized = (f"{form.block_size or 'channel'}", "no" if form.symmetric else "yes", f"{form.accuracy_level}")
        name, cells = (f"{form.bits} bits", quantized) if form.bits != 32 else ("float32 Gemm", ("-", "-", "-"))
        name += _inputs(form.activations)
        where = " (last row)" if found.only_last and found.counts else ""
        counts = ", ".join(map(str, found.counts)) + where if found.counts else "none"
        print(f"| {name} | {' | '.join(cells)} | {padding_needed(found.counts)} | {counts} | {found.difference:.0e} |")


if __name__ == "__main__":
    main()
