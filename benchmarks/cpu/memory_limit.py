"""A model in less memory than it takes: tokens per second of Ingot and of llama.cpp with mmap under one limit.

    python -m benchmarks.cpu.memory_limit --output benchmarks/results/cpu-memory-limit.json

Both run the shape of TinyLlama with weights of 4 bits, each in a process of its own in a control group of this
benchmark's: first without a limit, then with `--share` of what Ingot then took, files that it has mapped included. The
file of the weights is dropped from the page cache before each run, so that its pages count for the run's own group. A
machine where no control group of memory can be made is refused by name: other limits (ulimit) do not count the pages of
files. llama.cpp does not repack its weights, a copy of which would not fit.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import click

from benchmarks.paths import ROOT

PEER_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
"""Interpreter that has llama.cpp; benchmarks.cpu.setup_peers makes it."""
_GROUPS = Path("/sys/fs/cgroup")
_CONTEXT, _PROMPT_TOKENS = 8192, 16
_LONGEST_SECONDS = 900
Part = Literal["ingot", "llama.cpp"]


# The control group


class MemoryGroup:
    """A control group of memory, of version 2 or 1, for one run. ClickException where none can be made."""

    def __init__(self) -> None:
        self._is_new = (_GROUPS / "cgroup.controllers").exists()
        parent = _GROUPS if self._is_new else _GROUPS / "memory"
        self.folder = parent / f"ingot-memory-limit-{os.getpid()}"
        try:
            if self._is_new and "memory" not in (parent / "cgroup.subtree_control").read_text().split():
                (parent / "cgroup.subtree_control").write_text("+memory")
            self.folder.mkdir()
        except OSError as error:
            raise click.ClickException(
                f"no memory limit can be imposed here: {self.folder} cannot be made ({error.strerror}); run as root"
                " where control groups can be written to"
            ) from error

    def limit(self, size: int | None) -> None:
        """Limit the bytes of its processes, the pages of files included."""
        most = "max" if self._is_new else "-1"
        name = "memory.max" if self._is_new else "memory.limit_in_bytes"
        (self.folder / name).write_text(most if size is None else str(size))

    def join(self) -> None:
        """Put this process into it."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def peak_bytes(self) -> int:
        """The most that it took."""
        name = "memory.peak" if self._is_new else "memory.max_usage_in_bytes"
        return int((self.folder / name).read_text())

    def close(self) -> None:
        """Remove it; its processes have ended."""
        self.folder.rmdir()


# The two engines, each in the child process


def run_ingot(model: Path, threads: int, tokens: int) -> dict[str, Any]:
    """Times of the steps of one answer."""
    from ingot.runtime import Engine, SamplingParams

    started = time.perf_counter()
    with Engine.load(model, num_threads=threads, weights="mapped", kv_blocks=64, max_batch_tokens=64) as engine:
        loaded = time.perf_counter() - started
        engine.add(list(range(5, 5 + _PROMPT_TOKENS)), SamplingParams(max_tokens=tokens + 1, ignore_eos=True))
        return {"load_seconds": round(loaded, 2), **_times(tokens, lambda: any(one.tokens for one in engine.step()))}


def run_llama_cpp(model: Path, threads: int, tokens: int) -> dict[str, Any]:
    """The same by llama.cpp, from the mapped file."""
    import llama_cpp

    started = time.perf_counter()
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers, params.use_extra_bufts = 0, False
    params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP
    loaded = llama_cpp.llama_model_load_from_file(str(model).encode(), params)
    sizes = llama_cpp.llama_context_default_params()
    sizes.n_ctx, sizes.n_batch, sizes.n_threads, sizes.n_threads_batch = 1024, 64, threads, threads
    context = llama_cpp.llama_init_from_model(loaded, sizes)
    seconds = time.perf_counter() - started
    batch = llama_cpp.llama_batch_init(64, 0, 1)
    place = 0

    def decode() -> bool:
        nonlocal place
        count = 1 if place else _PROMPT_TOKENS
        for row in range(count):
            batch.token[row], batch.pos[row] = 5 + row, place + row
            batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, 0, row == count - 1
        batch.n_tokens = count
        assert llama_cpp.llama_decode(context, batch) == 0
        place += count
        return True

    return {"load_seconds": round(seconds, 2), **_times(tokens, decode)}


def _times(tokens: int, step: Callable[[], bool]) -> dict[str, Any]:
    """Seconds of the prompt, and of each token after it."""
    seconds = list[float]()
    while len(seconds) <= tokens:
        started = time.perf_counter()
        while not step():
            pass
        seconds.append(time.perf_counter() - started)
    rest = seconds[1:]
    return {
        "prompt_seconds": round(seconds[0], 3),
        "token_seconds": [round(each, 3) for each in rest],
        "tokens_per_second": round(len(rest) / sum(rest), 3),
    }


_RUNS: dict[Part, Callable[[Path, int, int], dict[str, Any]]] = {"ingot": run_ingot, "llama.cpp": run_llama_cpp}


def _child(part: Part, model: Path, threads: int, tokens: int) -> None:
    print(json.dumps(_RUNS[part](model, threads, tokens)))


# The parent


def measure(part: Part, model: Path, threads: int, tokens: int, limit: int | None, peer: Path) -> dict[str, Any]:
    """Run an engine in a group of its own."""
    from ingot.artifact.page_cache import drop_from_cache

    for file in model.rglob("*") if model.is_dir() else [model]:
        if file.is_file() and (problem := drop_from_cache(file)):
            raise click.ClickException(f"{file}: its cached pages cannot be dropped ({problem})")
    python = sys.executable if part == "ingot" else str(peer)
    given = f"{part!r}, Path({str(model)!r}), {threads}, {tokens}"
    call = f"from benchmarks.cpu.memory_limit import _child, Path; _child({given})"
    group = MemoryGroup()
    try:
        group.limit(limit)
        done = subprocess.run(
            [python, "-c", call],
            preexec_fn=group.join,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
            capture_output=True,
            text=True,
            timeout=_LONGEST_SECONDS,
            check=False,
        )
        peak = group.peak_bytes
    except subprocess.TimeoutExpired:
        return {"engine": part, "limit_bytes": limit, "problem": f"took more than {_LONGEST_SECONDS} s"}
    finally:
        group.close()
    facts = {"engine": part, "limit_bytes": limit, "peak_bytes": peak}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
        return {**facts, "problem": lines[-1][:300]}
    return {**facts, **json.loads(done.stdout.splitlines()[-1])}


def _converted(checkpoint: Path, threads: int, peer: Path) -> Path:
    call = (
        "from benchmarks.gguf_export import export_quantized, Path;"
        f" print(export_quantized(Path({str(checkpoint)!r}), Path({str(checkpoint.parent)!r}), 'q4_0', {threads}))"
    )
    made = subprocess.run([str(peer), "-c", call], cwd=ROOT, capture_output=True, text=True, check=True)
    return Path(made.stdout.splitlines()[-1])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Tokens per second as Markdown."""
    lines = ["| engine | limit, MB | peak, MB | load, s | prompt, s | tokens/s |", "|---|---|---|---|---|---|"]
    for row in rows:
        limit = "none" if row["limit_bytes"] is None else f"{row['limit_bytes'] / 1e6:.0f}"
        found = [row["load_seconds"], row["prompt_seconds"], row["tokens_per_second"]] if "load_seconds" in row else []
        peak = f"{row.get('peak_bytes', 0) / 1e6:.0f}"
        lines.append(f"| {' | '.join(map(str, [row['engine'], limit, peak, *(found or [row['problem']])]))} |")
    return "\n".join(lines)


@click.command()
@click.option("--share", default=0.6, show_default=True, help="Share of the memory that Ingot takes without a limit.")
@click.option("--tokens", default=8, show_default=True, help="Tokens after a prompt of 16.")
@click.option("--threads", default=2, show_default=True)
@click.option("--artifact", type=click.Path(path_type=Path, exists=True), help="Ingot's; else it is built.")
@click.option("--gguf", type=click.Path(path_type=Path, exists=True), help="llama.cpp's; else it is converted.")
@click.option("--peer", type=click.Path(path_type=Path), default=PEER_PYTHON, help="Interpreter that has llama.cpp.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file of results.")
def main(
    share: float,
    tokens: int,
    threads: int,
    artifact: Path | None,
    gguf: Path | None,
    peer: Path,
    output: Path | None,
) -> None:
    """Measure both without a limit and with it, and print the table."""
    from benchmarks.device import device_facts
    from benchmarks.kv.synthetic_artifacts import WORK_FOLDER, synthetic_artifact
    from benchmarks.shapes import SHAPES

    shape = SHAPES["tinyllama-1.1b"]
    ours = artifact or synthetic_artifact(shape, "int4-cpu", context_tokens=_CONTEXT).path
    gguf = gguf or _converted(WORK_FOLDER / f"{shape.name}-{_CONTEXT}", threads, peer)
    models: list[tuple[Part, Path]] = [("ingot", ours), ("llama.cpp", gguf)]
    rows = [measure(part, model, threads, tokens, None, peer) for part, model in models]
    limit = int(share * rows[0]["peak_bytes"])
    rows += [measure(part, model, threads, tokens, limit, peer) for part, model in models]
    print(table(rows))
    if output is not None:
        facts = {"shape": shape.name, "share": share, "threads": threads, "prompt_tokens": _PROMPT_TOKENS}
        output.write_text(json.dumps({"device": device_facts(), **facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
