"""Ingot's attention kernel in every KV precision, next to onnxruntime's and llama.cpp's attention, in one run.

    python -m benchmarks.cpu.attention --threads 1 --threads 2 --ggml .venv-bench --output attention.json

Attention is in float32; keys and values in float16 are attended to in each kind of bfloat16 too (`cpu.attention`).
Ingot reads keys and values from shuffled blocks of 16 tokens, the others in one piece: onnxruntime's
GroupQueryAttention (float32) and, where --ggml names a folder that holds llama.cpp's libggml, its flash attention
with a KV cache of f16, q8_0 and q4_0. Contenders take turns, and 64 MiB are read before each call, as the next
layers' weights would be in an engine: keys and values come from memory, not from cache. Figures are of the best call:
on a busy machine the median shows the other processes. GB/s count the stored bytes of keys and values, GFLOP/s the
multiplications and additions of scores and weighted sums.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import click
import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
from onnx import TensorProto, helper

from benchmarks.cpu.ggml_attention import GGML_TYPES, GgmlAttention
from benchmarks.device import device_facts
from ingot.artifact import AttentionStep, KVGeometry
from ingot.artifact.kv_geometry import KVType, key_type, value_type
from ingot.artifact.programs.cpu_program import Arithmetic
from ingot.runtime.cpu.attention_operands import AttentionOperands
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.kv_precision import encode
from ingot.runtime.cpu.native.attention import NativeAttention, attention_backend, make_attention
from ingot.runtime.forward_batch import FloatArray, ForwardBatch

BLOCK_TOKENS = 16
GROUP = 32  # dims of int4 that share a scale and a minimum


@dataclass(frozen=True)
class Problem:
    """`sequences` sequences of `context` tokens each, the last `tokens` of which are queries in this step."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    context: int
    tokens: int = 1
    sequences: int = 1

    @property
    def operations(self) -> float:
        """Multiplications and additions of causal attention."""
        visible = self.tokens * self.context - self.tokens * (self.tokens - 1) / 2
        return 4 * self.sequences * self.heads * self.dim * visible


PROBLEMS = (
    *(Problem(f"TinyLlama, decode, {n // 1024}k", 32, 4, 64, n) for n in (4096, 16384, 32768)),
    *(Problem(f"Llama 3 8B, decode, {n // 1024}k", 32, 8, 128, n) for n in (4096, 16384, 32768)),
    Problem("Llama 2 7B, decode, 4k", 32, 32, 128, 4096),
    Problem("TinyLlama, decode, 8 x 4k", 32, 4, 64, 4096, sequences=8),
    Problem("TinyLlama, 512 tokens of a prompt at 4k", 32, 4, 64, 4096, tokens=512),
)


@dataclass(frozen=True)
class Result:
    """One contender on one problem. `error` is the largest difference from float32."""

    problem: str
    contender: str
    threads: int
    best_ms: float
    median_ms: float
    gigabytes_per_second: float
    gigaflops: float
    error: float


Run = Callable[[], FloatArray]


@dataclass(frozen=True)
class Contender:
    """A call that attends once and returns [tokens, heads * dim], and the bytes of keys and values that it reads."""

    run: Run
    kv_bytes: int


class Data:
    """Random queries [rows, heads * dim], keys and values [sequences, kv heads, context, dim] of a problem."""

    def __init__(self, problem: Problem) -> None:
        rng, p = np.random.default_rng(0), problem
        self.problem = p
        self.query = rng.standard_normal((p.sequences * p.tokens, p.heads * p.dim), dtype=np.float32)
        self.keys, self.values = (
            rng.standard_normal((p.sequences, p.kv_heads, p.context, p.dim), dtype=np.float32) for _ in range(2)
        )
        blocks = -(-p.context // BLOCK_TOKENS)
        self.table = rng.permutation(blocks * p.sequences).astype(np.int32).reshape(p.sequences, blocks)

    def rows(self, vectors: FloatArray) -> FloatArray:
        """The step's own keys or values [rows, kv heads * dim]."""
        p = self.problem
        return np.ascontiguousarray(vectors[:, :, -p.tokens :].transpose(0, 2, 1, 3)).reshape(len(self.query), -1)

    def pool(self, dtype: KVType) -> KVPool:
        """A pool that holds the keys and values."""
        p = self.problem
        geometry = KVGeometry(
            num_layers=1, num_kv_heads=p.kv_heads, head_dim=p.dim, block_tokens=BLOCK_TOKENS, dtype=dtype,
            int4_group=GROUP if value_type(dtype) == "int4" else 0,
        )  # fmt: skip
        pool = KVPool(geometry, self.table.size)
        views = pool.layer(0)
        for vectors, kind, codes, scales in (
            (self.keys, key_type(dtype), views.keys, views.key_scales),
            (self.values, value_type(dtype), views.values, views.value_scales),
        ):
            blocks = vectors.reshape(p.sequences, p.kv_heads, -1, BLOCK_TOKENS, p.dim).swapaxes(1, 2)
            codes[self.table], made = encode(blocks, kind, geometry.int4_group)
            if scales is not None:
                scales[self.table] = made
        return pool

    @property
    def batch(self) -> ForwardBatch:
        """The step's sequences."""
        p = self.problem
        nothing = np.zeros(len(self.query), np.int64)
        starts = (np.arange(p.sequences + 1) * p.tokens).astype(np.int32)
        return ForwardBatch(nothing, nothing, nothing, starts, np.full(p.sequences, p.context, np.int32), self.table)


def contenders(data: Data, threads: int, ggml: Path | None) -> Iterator[tuple[str, Contender]]:
    """Name and contender, the reference first."""
    for dtype in get_args(KVType):
        yield f"Ingot {dtype}", _ours(data, dtype, threads)
    for arithmetic in get_args(Arithmetic)[1:] if attention_backend() != "numpy" else ():
        yield f"Ingot float16, in {arithmetic}", _ours(data, "float16", threads, arithmetic)
    yield "onnxruntime float32", _onnxruntime(data, threads)
    for name in GGML_TYPES if ggml is not None and data.problem.sequences == 1 else ():
        assert ggml is not None
        made = GgmlAttention(ggml, name, data.query, data.keys[0], data.values[0], threads)
        yield f"llama.cpp {name}", Contender(made.attend, made.kv_bytes)


def _ours(data: Data, dtype: KVType, threads: int, arithmetic: Arithmetic = "float32") -> Contender:
    p, pool, output = data.problem, data.pool(dtype), np.zeros_like(data.query)
    attention = make_attention(pool, threads) if arithmetic == "float32" else NativeAttention(pool, threads, arithmetic)
    attention.begin(data.batch)
    step = AttentionStep(
        layer=0, query="q", key="k", value="v", output="o", num_heads=p.heads, num_kv_heads=p.kv_heads,
        head_dim=p.dim, scale=p.dim**-0.5,
    )  # fmt: skip
    operands = AttentionOperands(data.query, data.rows(data.keys), data.rows(data.values))
    attend = attention.bind(step, operands, output)
    token_bytes = pool.geometry.block_bytes // BLOCK_TOKENS
    return Contender(lambda: (attend(), output)[1], token_bytes * p.context * p.sequences)


def _onnxruntime(data: Data, threads: int) -> Contender:
    """GroupQueryAttention, whose past and present are one buffer."""
    p, session = data.problem, _session(data.problem, threads)
    binding = session.io_binding()
    past = [onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(x)) for x in (data.keys, data.values)]
    shape = (p.sequences, p.tokens, -1)
    inputs = {
        "query": data.query.reshape(shape),
        "key": data.rows(data.keys).reshape(shape),
        "value": data.rows(data.values).reshape(shape),
        "seqlens_k": np.full(p.sequences, p.context - 1, np.int32),
        "total": np.array(p.context, np.int32),
    }
    for name, array in inputs.items():
        binding.bind_cpu_input(name, array)
    for name, value in zip(("past_key", "past_value"), past, strict=True):
        binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(name.replace("past", "present"), value)
    binding.bind_output("output")

    def run() -> FloatArray:
        session.run_with_iobinding(binding)
        result: FloatArray = binding.get_outputs()[2].numpy().reshape(len(data.query), -1)
        return result

    return Contender(run, data.keys.nbytes + data.values.nbytes)


def _session(p: Problem, threads: int) -> onnxruntime.InferenceSession:
    kv = [None, p.kv_heads, p.context, p.dim]
    types: dict[str, tuple[int, list[int | None]]] = {
        "query": (TensorProto.FLOAT, [None, None, p.heads * p.dim]),
        "key": (TensorProto.FLOAT, [None, None, p.kv_heads * p.dim]),
        "value": (TensorProto.FLOAT, [None, None, p.kv_heads * p.dim]),
        "past_key": (TensorProto.FLOAT, kv),
        "past_value": (TensorProto.FLOAT, kv),
        "seqlens_k": (TensorProto.INT32, [None]),
        "total": (TensorProto.INT32, []),
        "present_key": (TensorProto.FLOAT, kv),
        "present_value": (TensorProto.FLOAT, kv),
        "output": (TensorProto.FLOAT, [None, None, p.heads * p.dim]),
    }
    values = {name: helper.make_tensor_value_info(name, *kind) for name, kind in types.items()}
    names = list(types)
    node = helper.make_node(
        "GroupQueryAttention", names[:7], ["output", "present_key", "present_value"], domain="com.microsoft",
        num_heads=p.heads, kv_num_heads=p.kv_heads, scale=p.dim**-0.5,
    )  # fmt: skip
    graph = helper.make_graph([node], "attention", [values[n] for n in names[:7]], [values[n] for n in names[7:]])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except RuntimeError:  # an engine of this process has made onnxruntime's global pool, as in tests
        options.use_per_session_threads = False
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def measure(problem: Problem, threads: int, seconds: float, ggml: Path | None) -> Iterator[Result]:
    """Time all contenders in turns for about `seconds` each."""
    data = Data(problem)
    made = dict(contenders(data, threads, ggml))
    expected = next(iter(made.values())).run().copy()
    errors = {name: float(np.abs(one.run() - expected).max()) for name, one in made.items()}
    times: dict[str, list[float]] = {name: [] for name in made}
    everything_else = np.ones(16 << 20, np.float32)  # 64 MiB
    end = time.perf_counter() + seconds * len(made)
    while not all(times.values()) or time.perf_counter() < end:
        for name, one in made.items():
            everything_else.max()
            start = time.perf_counter()
            one.run()
            times[name].append(time.perf_counter() - start)
    for name, taken in times.items():
        best = min(taken)
        rates = (made[name].kv_bytes / best / 1e9, problem.operations / best / 1e9)
        yield Result(problem.name, name, threads, best * 1e3, statistics.median(taken) * 1e3, *rates, errors[name])


def make_table(results: list[Result]) -> str:
    """A Markdown table: a row per contender, a column per problem and thread count: best ms, GB/s, GFLOP/s."""
    columns = list(dict.fromkeys((r.problem, r.threads) for r in results))
    titles = [f"{problem}, {threads} thread{'s' if threads > 1 else ''}" for problem, threads in columns]
    lines = ["| | " + " | ".join(titles) + " |", "|---" * (len(columns) + 1) + "|"]
    cells = {
        (r.contender, r.problem, r.threads): f"{r.best_ms:.2f} ms, {r.gigabytes_per_second:.1f}, {r.gigaflops:.0f}"
        for r in results
    }
    for name in dict.fromkeys(r.contender for r in results):
        lines.append(f"| {name} | " + " | ".join(cells.get((name, *column), "") for column in columns) + " |")
    return "\n".join(lines)


def _in_process_of_its_own(threads: int, seconds: float, ggml: Path | None, only: str) -> list[Result]:
    """Measure in a child process: numpy reads its number of threads from the environment at import."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "benchmarks.cpu.attention", "--child", "--threads", str(threads)]
    command += ["--seconds", str(seconds), "--only", only, *(("--ggml", str(ggml)) if ggml else ())]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    return [Result(**record) for record in json.loads(output)]


@click.command(help=__doc__)
@click.option("--threads", multiple=True, type=click.IntRange(min=1), default=(1,), help="May be given more than once.")
@click.option("--seconds", default=1.0, show_default=True, help="Per contender and problem.")
@click.option("--ggml", type=click.Path(path_type=Path), help="Folder that holds libggml-cpu.so; without, left out.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the figures as JSON.")
@click.option("--only", default="", help="Problems whose names contain this.")
@click.option("--child", is_flag=True, hidden=True)
def main(
    threads: tuple[int, ...], seconds: float, ggml: Path | None, output: Path | None, only: str, child: bool
) -> None:
    """Measure, print the table, write the JSON."""
    if child:
        problems = [problem for problem in PROBLEMS if only in problem.name]
        results = [result for problem in problems for result in measure(problem, threads[0], seconds, ggml)]
        click.echo(json.dumps([asdict(result) for result in results]))
        return
    results = [result for count in threads for result in _in_process_of_its_own(count, seconds, ggml, only)]
    click.echo(make_table(results))
    if output is not None:
        versions = {"numpy": np.__version__, "onnxruntime": onnxruntime.__version__, "onnx": onnx.__version__}
        record = {"device": device_facts(), "versions": versions, "results": [asdict(result) for result in results]}
        output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
