"""Where the time of a step goes, by operation: of a prompt's step or of a decode step of the native engine.

    python -m benchmarks.cpu.profile_step ARTIFACT --tokens 512              # the first 512 tokens of a prompt
    python -m benchmarks.cpu.profile_step ARTIFACT --sequences 8 --context 64 --threads 2

Operations of one kind and size share a line. Of each step's times the one with the least sum is shown: other processes
make a step slower, never faster. GOPS are 2 n k for each row that an operation computes, GB/s are of packed weights.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from ingot.artifact import open_artifact
from ingot.artifact.programs.cpu_program import WEIGHTS_FILE, CpuProgram, Linear, Operation
from ingot.artifact.programs.cpu_program_checks import read_operations
from ingot.artifact.safetensors import MappedTensors
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.native.program import NativeProgram
from ingot.runtime.forward_batch import ForwardBatch


@dataclass(frozen=True)
class Step:
    """`sequences` sequences with `context` tokens in the pool, `tokens` more of each; the last ones get logits."""

    sequences: int
    tokens: int
    context: int

    def batch(self, program: CpuProgram) -> ForwardBatch:
        """The batch, of random tokens in shuffled blocks; what the context holds does not matter."""
        rng, end = np.random.default_rng(0), self.context + self.tokens
        blocks = -(-end // program.kv.block_tokens)
        return ForwardBatch(
            input_ids=rng.integers(0, program.vocab_size, self.sequences * self.tokens),
            position_ids=np.tile(np.arange(self.context, end), self.sequences),
            logits_indices=np.arange(1, self.sequences + 1) * self.tokens - 1,
            query_starts=np.arange(self.sequences + 1, dtype=np.int32) * self.tokens,
            context_lens=np.full(self.sequences, end, np.int32),
            block_tables=rng.permutation(self.sequences * blocks).astype(np.int32).reshape(self.sequences, blocks),
        )


@dataclass
class Line:
    """Operations of one kind and size."""

    count: int = 0
    seconds: float = 0.0
    operations: float = 0.0
    weight_bytes: int = 0


def least_seconds(program: NativeProgram, batch: ForwardBatch, count: int, rounds: int) -> NDArray[np.float64]:
    """Seconds of each of the program's `count` operations in the fastest of the steps."""
    found = np.zeros((rounds + 1, count))
    for seconds in found:  # the first one warms up
        program.step(batch, seconds)
    best: NDArray[np.float64] = found[1 + found[1:].sum(axis=1).argmin()]
    return best


def lines_of(program: CpuProgram, batch: ForwardBatch, seconds: NDArray[np.float64]) -> dict[str, Line]:
    """Operations by kind and size, in the order of the program."""
    lines: dict[str, Line] = defaultdict(Line)
    for operation, duration in zip(program.operations, seconds, strict=True):
        line = lines[_name(program, operation)]
        line.count += 1
        line.seconds += float(duration)
        if isinstance(operation, Linear):
            matrix = program.matrices[operation.matrix]
            rows = len(batch.logits_indices) if operation.rows == "logits" else batch.num_tokens
            line.operations += 2 * matrix.n * matrix.k * rows
            line.weight_bytes += matrix.num_bytes
    return lines


def _name(program: CpuProgram, operation: Operation) -> str:
    last = ", rows of logits" if getattr(operation, "rows", "tokens") == "logits" else ""
    if not isinstance(operation, Linear):
        return operation.kind + last
    matrix = program.matrices[operation.matrix]
    return f"linear {matrix.k} -> {matrix.n} {matrix.form}{last}"


def table(lines: dict[str, Line]) -> Iterator[str]:
    """The lines as text, and their sum."""
    total = sum(line.seconds for line in lines.values())
    for name, line in lines.items():
        speed = ""
        if line.operations:
            giga = 1e9 * line.seconds
            speed = f"{line.operations / giga:8.1f} GOPS {line.weight_bytes / giga:6.1f} GB/s"
        yield f"{line.count:4} {name:48} {1e3 * line.seconds:9.3f} ms {line.seconds / total:6.1%} {speed}".rstrip()
    yield f"{'':4} {'all':48} {1e3 * total:9.3f} ms"


@click.command(help=__doc__.partition("\n")[0])
@click.argument("artifact", type=click.Path(path_type=Path, exists=True))
@click.option("--sequences", default=1, show_default=True)
@click.option("--tokens", default=1, show_default=True, help="Of each sequence in the step.")
@click.option("--context", default=0, show_default=True, help="Tokens of each sequence before the step.")
@click.option("--threads", default=1, show_default=True)
@click.option("--isa", help="Instruction set of the kernels; the best one by default.")
@click.option("--rounds", default=10, show_default=True)
def main(artifact: Path, sequences: int, tokens: int, context: int, threads: int, isa: str | None, rounds: int) -> None:
    """Time steps, and print the fastest."""
    opened = open_artifact(artifact, verify=False)
    program, step = read_operations(opened), Step(sequences, tokens, context)
    batch = step.batch(program)
    pool = KVPool(program.kv, batch.block_tables.size)
    weights = MappedTensors(opened.file(WEIGHTS_FILE))
    engine = NativeProgram(
        program, weights, pool, max_batch_tokens=batch.num_tokens, num_threads=threads, isa=isa
    )  # fmt: skip
    seconds = least_seconds(engine, batch, len(program.operations), rounds)
    click.echo(f"{step}, {threads} threads, {engine.isa}")
    for line in table(lines_of(program, batch, seconds)):
        click.echo(line)


if __name__ == "__main__":
    main()
