"""Ingot's attention kernel next to onnxruntime's Attention op and numpy, in one run, with the same threads.

    python -m benchmarks.cpu.attention --threads 1 --threads 2 --output benchmarks/results/attention.json

Paged contenders read keys and values from shuffled blocks of 16 tokens. The contiguous contender gets them in one
piece, which an engine with a paged pool does not have: its best case. Contenders take turns, and 64 MiB are read before
each call, as the next layers' weights would be in an engine: keys and values come from memory, not from cache. The
table shows medians in ms, the best in brackets. Every result is compared with the first contender's.
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

import click
import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
from onnx import TensorProto, helper

from benchmarks.device import device_facts
from ingot.artifact import AttentionStep, KVGeometry
from ingot.runtime.cpu.attention_operands import Operands
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.native.attention import attention_backend, make_attention
from ingot.runtime.cpu.native.numpy_attention import NumpyAttention
from ingot.runtime.steps.batch import FloatArray, ForwardBatch

BLOCK_TOKENS = 16


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


PROBLEMS = (
    Problem("decode, 4096 tokens", 32, 4, 64, 4096),
    Problem("decode, 512 tokens", 32, 4, 64, 512),
    Problem("decode, 8 x 1024 tokens", 32, 4, 64, 1024, sequences=8),
    Problem("decode, 4096 tokens, no groups", 8, 8, 64, 4096),
    Problem("decode, 4096 tokens, dim 128", 32, 8, 128, 4096),
    Problem("prefill, 512 tokens", 32, 4, 64, 512, tokens=512),
)


@dataclass(frozen=True)
class Result:
    """Milliseconds of one contender on one problem."""

    problem: str
    contender: str
    threads: int
    median_ms: float
    best_ms: float
    max_difference: float


class Data:
    """Make random queries, keys and values of a problem, in a shuffled pool."""

    def __init__(self, problem: Problem) -> None:
        rng, p = np.random.default_rng(0), problem
        self.problem = p
        blocks = -(-p.context // BLOCK_TOKENS)
        geometry = KVGeometry(num_layers=1, num_kv_heads=p.kv_heads, head_dim=p.dim, block_tokens=BLOCK_TOKENS)
        self.pool = KVPool(geometry, blocks * p.sequences)
        self.pool.blocks[:] = rng.standard_normal(self.pool.blocks.shape, dtype=np.float32)
        self.table = rng.permutation(blocks * p.sequences).astype(np.int32).reshape(p.sequences, blocks)
        rows = p.sequences * p.tokens
        self.query = rng.standard_normal((rows, p.heads * p.dim), dtype=np.float32)
        keys, values = self.gather()  # [sequences, kv heads, context, dim]
        self.key, self.value = (
            np.ascontiguousarray(x[:, :, -p.tokens :].transpose(0, 2, 1, 3)).reshape(rows, -1) for x in (keys, values)
        )

    def gather(self) -> tuple[FloatArray, FloatArray]:
        """Keys and values [sequences, kv heads, context, dim], copied out of the pool."""
        p = self.problem
        blocks = self.pool.blocks[self.table, 0]  # [sequences, blocks, 2, kv heads, block tokens, dim]
        both = blocks.transpose(2, 0, 3, 1, 4, 5).reshape(2, p.sequences, p.kv_heads, -1, p.dim)
        return both[0, :, :, : p.context], both[1, :, :, : p.context]

    @property
    def batch(self) -> ForwardBatch:
        p = self.problem
        nothing = np.zeros(p.sequences * p.tokens, np.int64)
        starts = (np.arange(p.sequences + 1) * p.tokens).astype(np.int32)
        return ForwardBatch(nothing, nothing, nothing, starts, np.full(p.sequences, p.context, np.int32), self.table)

    @property
    def step(self) -> AttentionStep:
        p = self.problem
        return AttentionStep(
            layer=0, query="q", key="k", value="v", output="o", num_heads=p.heads, num_kv_heads=p.kv_heads,
            head_dim=p.dim, scale=p.dim**-0.5,
        )  # fmt: skip


Run = Callable[[], FloatArray]


def contenders(data: Data, threads: int) -> dict[str, Run]:
    """Name -> a call that attends once and returns [tokens, heads * dim]."""
    session = _attention_session(data.problem, threads)
    return {
        f"ingot ({attention_backend()})": _ours(data, threads),
        "ingot (numpy form)": _reference(data),
        "numpy: gather, matmul, softmax": lambda: _numpy(data),
        "onnxruntime Attention: gather": lambda: _ort(session, data, *data.gather()),
        "onnxruntime Attention: contiguous": _contiguous(session, data),
    }


def _ours(data: Data, threads: int) -> Run:
    attention, output = make_attention(data.pool, threads), np.zeros_like(data.query)
    attention.begin(data.batch)
    attend = attention.bind(data.step, Operands(data.query, data.key, data.value), output)
    return lambda: (attend(), output)[1]


def _reference(data: Data) -> Run:
    attention, output = NumpyAttention(data.pool), np.zeros_like(data.query)
    attention.begin(data.batch)
    attend = attention.bind(data.step, Operands(data.query, data.key, data.value), output)
    return lambda: (attend(), output)[1]


def _numpy(data: Data) -> FloatArray:
    p = data.problem
    keys, values = data.gather()
    group = p.heads // p.kv_heads
    q = data.query.reshape(p.sequences, p.tokens, p.kv_heads, group, p.dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(p.sequences, p.kv_heads, group * p.tokens, p.dim) * np.float32(p.dim**-0.5)
    scores = q @ keys.transpose(0, 1, 3, 2)  # [sequences, kv heads, group * tokens, context]
    if p.tokens > 1:
        future = np.triu(np.full((p.tokens, p.context), -np.inf, np.float32), 1 + p.context - p.tokens)
        scores += np.tile(future, (group, 1))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    output = (weights @ values).reshape(p.sequences, p.kv_heads, group, p.tokens, p.dim)
    result: FloatArray = output.transpose(0, 3, 1, 2, 4).reshape(len(data.query), -1)
    return result


def _contiguous(session: onnxruntime.InferenceSession, data: Data) -> Run:
    keys, values = (np.ascontiguousarray(x) for x in data.gather())
    return lambda: _ort(session, data, keys, values)


def _ort(session: onnxruntime.InferenceSession, data: Data, keys: FloatArray, values: FloatArray) -> FloatArray:
    p = data.problem
    query = data.query.reshape(p.sequences, p.tokens, p.heads, p.dim).transpose(0, 2, 1, 3)
    (output,) = session.run(None, {"q": np.ascontiguousarray(query), "k": keys, "v": values})
    result: FloatArray = output.transpose(0, 2, 1, 3).reshape(len(data.query), -1)
    return result


def _attention_session(p: Problem, threads: int) -> onnxruntime.InferenceSession:
    node = helper.make_node("Attention", ["q", "k", "v"], ["o"], scale=p.dim**-0.5, is_causal=int(p.tokens > 1))
    names = {"q": p.heads, "k": p.kv_heads, "v": p.kv_heads, "o": p.heads}
    values = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, heads, None, p.dim])
        for name, heads in names.items()
    }
    graph = helper.make_graph([node], "attention", [values["q"], values["k"], values["v"]], [values["o"]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def measure(problem: Problem, threads: int, seconds: float) -> Iterator[Result]:
    """Time all contenders in turns for about `seconds` each."""
    data = Data(problem)
    runs = contenders(data, threads)
    expected = next(iter(runs.values()))().copy()
    differences = {name: float(np.abs(run() - expected).max()) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    everything_else = np.ones(16 << 20, np.float32)  # 64 MiB
    end = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < end:
        for name, run in runs.items():
            everything_else.max()
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
    for name, ms in times.items():
        yield Result(problem.name, name, threads, statistics.median(ms), min(ms), differences[name])


def make_table(results: list[Result]) -> str:
    """A Markdown table: a row per problem and thread count, a column per contender; medians, best in brackets."""
    names = list(dict.fromkeys(result.contender for result in results))
    lines = ["| | threads | " + " | ".join(names) + " |", "|---|---" + "|---" * len(names) + "|"]
    cells = {(r.problem, r.threads, r.contender): f"{r.median_ms:.2f} ({r.best_ms:.2f})" for r in results}
    for problem, threads in dict.fromkeys((r.problem, r.threads) for r in results):
        row = [cells[problem, threads, name] for name in names]
        lines.append(f"| {problem} | {threads} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def _in_process_of_its_own(threads: int, seconds: float) -> list[Result]:
    """Measure in a child process: numpy reads its number of threads from the environment at import."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "benchmarks.cpu.attention", "--child", "--threads", str(threads)]
    command += ["--seconds", str(seconds)]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    return [Result(**record) for record in json.loads(output)]


@click.command(help=__doc__)
@click.option("--threads", multiple=True, type=click.IntRange(min=1), default=(1,), help="May be given more than once.")
@click.option("--seconds", default=2.0, show_default=True, help="Per contender and problem.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the figures as JSON.")
@click.option("--child", is_flag=True, hidden=True)
def main(threads: tuple[int, ...], seconds: float, output: Path | None, child: bool) -> None:
    """Measure, print the table, write the JSON."""
    if child:
        results = [result for problem in PROBLEMS for result in measure(problem, threads[0], seconds)]
        click.echo(json.dumps([asdict(result) for result in results]))
        return
    results = [result for count in threads for result in _in_process_of_its_own(count, seconds)]
    click.echo(make_table(results))
    if output is not None:
        versions = {"numpy": np.__version__, "onnxruntime": onnxruntime.__version__}
        record = {"device": device_facts(), "versions": versions, "results": [asdict(result) for result in results]}
        output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
