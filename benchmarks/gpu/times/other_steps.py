"""Steps of the 4-bit 8B model that the part "steps" leaves out, and the kernels that choose tokens, alone.

samplers       `greedy` and `draw` over one row of logits and more
contexts       decode steps over 1,024 tokens and more; of buckets of 2, 4, 16 and 32 rows, too
prompts        two prompts in one step, and a prompt in the step of decoding sequences
filled pool    decode steps over all of a KV pool that takes most of the memory
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.gpu.device import Bench, SyntheticExecutor, decode_batch, ragged_batch
from benchmarks.gpu.figures import Work
from benchmarks.gpu.parts import Record, Task
from benchmarks.gpu.programs.models import LLAMA_8B, MORE_BUCKETS
from benchmarks.gpu.times.launches import Group, groups, step_work
from benchmarks.gpu.times.steps import DECODE_CONTEXT, OpenedProgram, open_program, program_files
from ingot.runtime.cuda.programs import BoundProgram, Part
from ingot.runtime.forward_batch import ForwardBatch, SamplingArrays

_CONTEXTS = (DECODE_CONTEXT, 4096, 8192, 16384, 32768)
_FILLED, _FILLED_DRY = "75%", "1%"  # share of the free memory
_TEMPERATURE, _TOP_K, _TOP_P = 0.8, 40, 0.95
_LEAST_SECONDS = 12.0  # loading included

Measure = Callable[[Bench, SyntheticExecutor], Iterator[Record]]


def other_steps(bench: Bench) -> list[Task]:
    """All of keys in 16 bits first, then of quantized ones; a filled pool last, for which a program is opened anew."""
    files = [file for file in program_files(bench.programs) if "-int4-kv-" in file.stem]
    if not bench.machine.is_dry:
        files = [file for file in files if file.stem.startswith(LLAMA_8B.name)]
    files += sorted(bench.programs.glob(f"*{MORE_BUCKETS}.zip"))
    opened, tasks = OpenedProgram(bench), list[Task]()
    for file in files:
        kinds: dict[str, Measure] = {"contexts": _contexts}
        if not file.stem.endswith(MORE_BUCKETS):
            kinds["prompts"] = _prompts
        if file == files[0]:
            kinds = {"samplers": _samplers, **kinds}
        for kind, measure in kinds.items():
            run = partial(_with_opened, opened, file, measure)
            tasks.append(Task(f"{file.stem} {kind}", run, least=_LEAST_SECONDS))
    if files:
        tasks.append(
            Task(f"{files[0].stem} filled pool", partial(_filled_pool, opened, files[0]), least=_LEAST_SECONDS)
        )
    return tasks


def _with_opened(opened: OpenedProgram, file: Path, measure: Measure) -> Iterator[Record]:
    with opened.use(file) as executor:
        for record in measure(opened.bench, executor):
            yield {"program": file.stem, **record}


def _decode_programs(executor: SyntheticExecutor) -> list[BoundProgram]:
    return [bound for bound in executor.loaded.programs if bound.program.attention == "decode"]


def _samplers(bench: Bench, executor: SyntheticExecutor) -> Iterator[Record]:
    """Both over the logits of a step; `draw` keeps 40 tokens of 0.95."""
    device, stream = executor.loaded.device, executor.loaded.stream
    stopwatch = bench.machine.stopwatch(device)
    for bound in _decode_programs(executor):
        rows = bound.program.rows
        draws = SamplingArrays(
            temperatures=np.full(rows, _TEMPERATURE, np.float32),
            top_ks=np.full(rows, _TOP_K, np.int32),
            top_ps=np.full(rows, _TOP_P, np.float32),
            uniforms=np.random.default_rng(0).random(rows, np.float32),
        )
        context = min(DECODE_CONTEXT, executor.model.context_tokens)
        executor.send(bound, decode_batch(rows, context, executor.kv_geometry.block_tokens), draws)
        executor.step(bound, "logits")(stream)
        for name, steps in bound.samplers.items():
            work = Work(4.0 * rows * executor.model.vocab_size)
            graph = device.capture(stream, Group(name, tuple(queue for _, queue in steps), work, 0.0).all)
            seconds = bench.timed(stopwatch, stream, partial(device.replay, graph))
            facts: Record = {"sampler": name, "rows": rows, "launches": len(steps)}
            yield {"figure": "sampler", **facts, **work.record(seconds, bench.peaks)}


def _contexts(bench: Bench, executor: SyntheticExecutor) -> Iterator[Record]:
    longest, block = executor.model.context_tokens, executor.kv_geometry.block_tokens
    for bound in _decode_programs(executor):
        rows = bound.program.rows
        room = executor.num_blocks // rows * block
        for context in [one for one in _CONTEXTS if one <= min(longest, room)] or [min(longest, room)]:
            yield _step(bench, executor, bound, decode_batch(rows, context, block), "decode")


def _prompts(bench: Bench, executor: SyntheticExecutor) -> Iterator[Record]:
    """Each bucket of prompts by two prompts, and by half as many decoding sequences as it takes and one prompt."""
    longest, block = executor.model.context_tokens, executor.kv_geometry.block_tokens
    for bound in executor.loaded.programs:
        program = bound.program
        if program.attention != "decode" and program.sequences > 1:
            half, decoding = min(program.rows // 2, longest), program.sequences // 2
            yield _step(bench, executor, bound, ragged_batch([half] * 2, [half] * 2, block), "two prompts")
            prompt = min(program.rows - decoding, longest)
            lengths = [*[min(DECODE_CONTEXT, longest)] * decoding, prompt]
            yield _step(bench, executor, bound, ragged_batch([*[1] * decoding, prompt], lengths, block), "mixed")


def _filled_pool(opened: OpenedProgram, file: Path) -> Iterator[Record]:
    opened.close()
    bench = opened.bench
    executor = open_program(bench, file, kv_bytes=_FILLED_DRY if bench.machine.is_dry else _FILLED)
    try:
        block = executor.kv_geometry.block_tokens
        for bound in _decode_programs(executor):
            context = min(executor.model.context_tokens, executor.num_blocks // bound.program.rows * block)
            batch = decode_batch(bound.program.rows, context, block)
            step = _step(bench, executor, bound, batch, "filled pool")
            yield {"program": file.stem, "pool_bytes": executor.num_blocks * executor.kv_geometry.block_bytes, **step}
    finally:
        executor.close()


def _step(
    bench: Bench,
    executor: SyntheticExecutor,
    bound: BoundProgram,
    batch: ForwardBatch,
    kind: str,
    part: Part = "greedy",
) -> Record:
    """A whole step of a batch."""
    executor.send(bound, batch)
    work = step_work(groups(executor, bound, batch))
    stopwatch = bench.machine.stopwatch(executor.loaded.device)
    seconds = bench.timed(stopwatch, executor.loaded.stream, executor.step(bound, part))
    facts: Record = {
        "bucket": bound.program.name,
        "sequences": len(batch.context_lens),
        "rows": batch.num_tokens,
        "context": int(batch.context_lens.max()),
        "tokens_per_second": batch.num_tokens / seconds.median,
    }
    return {"figure": "other step", "kind": kind, **facts, **work.record(seconds, bench.peaks)}
