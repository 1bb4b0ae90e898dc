"""Damage to CPU launch programs that is sealed again, so that only checks of content are left to refuse it.

    python -m tests.program_fuzz COUNT [SEED]    tries COUNT random cases of each of PROGRAMS; keeps those that are new
    python -m tests.program_fuzz --worker ARTIFACT [--heap [ARRAYS]]    runs cases from standard input, for the others

A case is JSON: {"program": [[path, value], ...], "order": [index, ...], "header": [[path, value], ...], "bytes":
[[offset, hex], ...]} are changes of program/operations.json, the operations that it has then, changes of the header of
program/weights.safetensors, and of the bytes after it. CORPUS keeps a case of each refusal, and some that run. A worker
loads the damaged artifact and runs a few ragged steps; it must refuse it with an IngotError, or run it. A worker that
dies or hangs is a finding of its case. Sanitizers (benchmarks/cpu/sanitize.py) see what does not crash; --heap lets
them see the ends of arrays (simulators/heap_pools.py).
"""

import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from ingot.artifact import open_artifact
from ingot.artifact.programs.cpu_program import OPERATIONS_FILE, WEIGHTS_FILE
from ingot.artifact.programs.operation_row import Matrix
from ingot.errors import IngotError
from ingot.runtime import Engine, SamplingParams
from tests.artifact.tiny_artifact import reseal
from tests.data_paths import FIXTURES
from tests.simulators.heap_pools import place_on_heap

PROGRAMS: Mapping[str, tuple[str, str]] = {
    "int4-kv8": ("int4-kv8-cpu", "llama"),
    "experts": ("int4-cpu", "mixtral"),
    "latent attention, grouped experts": ("fp32-cpu", "deepseek_v3"),
    "delta rule": ("int8-cpu", "qwen3_next"),
    "scan": ("fp32-cpu", "bamba"),
    "sinks, windows, clamped activation": ("fp32-cpu", "gpt_oss"),
    "caps": ("int4-cpu", "gemma2"),
}
"""Recipes and checkpoints of tests/fixtures whose programs are damaged."""

CORPUS = FIXTURES / "damaged-programs.json"
"""For each of PROGRAMS, pairs of a case and its outcome: "refused" or "ran"."""
_MOST_THAT_RUN = 8

Case = dict[str, list[Any]]
KeyPath = tuple[str | int, ...]

CASE_SECONDS = 120.0
"""Longest time of one case, on a busy machine and with sanitizers; a longer one is a hang."""

_SIZES = (
    0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1024, 65535, 65536, 65537, 2**24, 2**31 - 1,
)  # fmt: skip
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e30, -1e30, 3.4e38, 1e300, 0.5)
_NUMBERS = tuple(
    map(bytes.fromhex, ("0000c07f", "0000807f", "000080ff", "ffff7f7f", "01000000", "00000080", "ffffffff"))
)
"""NaN, infinities, the largest, the smallest, minus zero, and codes of all bits."""
_PROMPTS = ([1, 2, 3], [5] * 19, [4, 6])
_STEPS = 3


# ---- cases


class Damager:
    """Random cases of one artifact; the same seed gives the same ones."""

    def __init__(self, folder: Path) -> None:
        self._program = json.loads((folder / OPERATIONS_FILE).read_text())
        content = (folder / WEIGHTS_FILE).read_bytes()
        self._begin = 8 + int.from_bytes(content[:8], "little")
        self._header = json.loads(content[8 : self._begin])
        self._num_bytes = len(content) - self._begin
        self._leaves = list(_leaves(self._program))
        self._values: dict[str | int, list[Any]] = {}
        for path, value in self._leaves:
            known = self._values.setdefault(_key_of(path), [])
            if value not in known:
                known.append(value)

    def cases(self, seed: int, count: int) -> Iterator[Case]:
        """Yield `count` random cases."""
        random = Random(seed)
        for _ in range(count):
            yield self._case(random)

    def one_of_each_field(self, seed: int) -> Iterator[Case]:
        """Yield a case for each field of each kind of operation, and of the other parts of the program."""
        random, seen = Random(seed), set[tuple[object, ...]]()
        for path, value in self._leaves:
            name = self._field_of(path)
            if name not in seen:
                seen.add(name)
                yield {"program": [[list(path), self._near(path, value, random)]]}

    def _field_of(self, path: KeyPath) -> tuple[object, ...]:
        kind = self._program["operations"][path[1]]["kind"] if path[0] == "operations" else path[0]
        named = (part for part in path[1:] if isinstance(part, str))
        return (kind, *named) if path[0] not in ("buffers", "matrices") else (kind, path[-1])

    def _case(self, random: Random) -> Case:
        match random.choice(("field", "field", "fields", "matrix", "matrix", "bytes", "operations")):
            case "field":
                return {"program": [self._change(random)]}
            case "fields":
                return {"program": [self._change(random) for _ in range(random.randint(2, 4))]}
            case "matrix":
                return self._reshaped_matrix(random)
            case "bytes":
                return {"bytes": [self._overwrite(random) for _ in range(random.randint(1, 8))]}
            case _:
                return {"order": self._other_order(random)}

    def _change(self, random: Random) -> list[Any]:
        path, value = random.choice(self._leaves)
        return [list(path), self._near(path, value, random)]

    def _near(self, path: KeyPath, value: Any, random: Random) -> Any:
        """Another value of the same type, most often one that the field, or one of its name, may have."""
        others = [other for other in self._values[_key_of(path)] if other != value]
        if others and random.random() < 0.4:
            return random.choice(others)
        match value:
            case bool():
                return not value
            case int():
                near = (value - 1, value + 1, value + 16, 2 * value, value // 2, -value)
                return random.choice((*near, *_SIZES, value * 1000))
            case float():
                return random.choice((*_FLOATS, -value, value * 1e10))
            case str():
                return random.choice((*_NAMES, value + "x", ""))
            case _:
                return random.choice((None, 0, 1, True, "", []))

    def _reshaped_matrix(self, random: Random) -> Case:
        """A matrix of other fields, whose tensor has the shape that they need where the file has bytes for it."""
        name = random.choice(list(self._program["matrices"]))
        fields = dict(self._program["matrices"][name])
        for key in random.sample(list(_MATRIX), random.randint(1, 3)):
            fields[key] = random.choice(_MATRIX[key])
        change = {"program": [[["matrices", name], fields]]}
        try:
            matrix = Matrix.model_validate(fields)
            num_bytes = matrix.num_bytes
        except (ValueError, ZeroDivisionError):
            return change
        begin, end = self._header[name]["data_offsets"]
        begin -= max(0, begin + num_bytes - self._num_bytes) // 64 * 64
        if num_bytes > end - begin and (begin < 0 or begin + num_bytes > self._num_bytes):
            return change
        tensor = {"dtype": "U8", "shape": [matrix.num_tiles, matrix.tile_bytes]}
        return {**change, "header": [[[name], {**tensor, "data_offsets": [begin, begin + num_bytes]}]]}

    def _overwrite(self, random: Random) -> list[Any]:
        new = random.choice((random.choice(_NUMBERS) * random.randint(1, 16), random.randbytes(random.randint(1, 64))))
        tensor = random.choice([one for name, one in self._header.items() if name != "__metadata__"])
        begin, end = tensor["data_offsets"]
        at = random.randrange(begin, max(begin + 1, end - len(new)))
        return [at // 4 * 4, new[: max(0, self._num_bytes - at)].hex()]

    def _other_order(self, random: Random) -> list[Any]:
        """The indices of the operations with one of them taken out, doubled, or moved."""
        order = list(range(len(self._program["operations"])))
        at, to = (random.randrange(len(order)) for _ in range(2))
        match random.choice(("remove", "double", "move")):
            case "remove":
                del order[at]
            case "double":
                order.insert(to, at)
            case _:
                order.insert(to, order.pop(at))
        return order


_NAMES = (
    "float32", "float16", "bfloat16", "float8", "int2", "int3", "int4", "int8", "none", "block", "token", "static",
    "silu", "gelu-erf", "relu", "sigmoid", "softplus", "relu2", "xielu", "clamp", "clamped-swiglu", "rms", "layer",
    "store", "add", "gate", "tokens", "logits", "softmax", "sparsemixer", "copy", "multiply", "position_ids",
    "input_ids", "k8v4", "fp8",
)  # fmt: skip
_MATRIX: Mapping[str, tuple[Any, ...]] = {
    "n": (1, 15, 16, 17, 31, 32, 48, 64, 96, 128, 256, 2**31 - 1),
    "k": (1, 15, 16, 17, 31, 32, 48, 64, 96, 128, 256, 2**31 - 1),
    "form": ("float32", "float16", "bfloat16", "float8", "int2", "int3", "int4", "int8"),
    "block": (0, 16, 32, 48, 64, 128, 65536),
    "per_row": (True, False),
    "scale_bytes": (0, 2, 4),
    "has_zeros": (True, False),
    "pairs": (True, False),
}


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
        return
    for key, inner in items:
        yield from _leaves(inner, (*path, key))


def _key_of(path: KeyPath) -> str | int:
    return next((part for part in reversed(path) if isinstance(part, str)), "")


# ---- the worker


def work(folder: Path, options: Sequence[str] = ()) -> None:
    """Run each case of standard input on a copy of the artifact; print a line with its outcome."""
    if options and options[0] == "--heap":
        place_on_heap(*options[1:])
    with tempfile.TemporaryDirectory() as temporary:
        for line in sys.stdin:
            copy = Path(shutil.copytree(folder, Path(temporary, "a"), dirs_exist_ok=True))
            damage(copy, json.loads(line))
            print(json.dumps(outcome(copy)), flush=True)


def damage(folder: Path, case: Case) -> None:
    """Make the changes of a case, and sizes and digests right again."""
    if "program" in case or "order" in case:
        file = folder / OPERATIONS_FILE
        program = _changed(json.loads(file.read_text()), case.get("program", []))
        if "order" in case:
            program["operations"] = [program["operations"][at] for at in case["order"]]
        file.write_text(json.dumps(program))
    if "header" in case or "bytes" in case:
        _damage_weights(folder / WEIGHTS_FILE, case)
    reseal(folder)


def _damage_weights(file: Path, case: Case) -> None:
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(_changed(json.loads(content[8:begin]), case.get("header", []))).encode()
    header += b" " * (-len(header) % 8)
    data = bytearray(content[begin:])
    for at, new in case.get("bytes", []):
        data[at : at + len(new) // 2] = bytes.fromhex(new)
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)


def _changed(document: Any, changes: Sequence[Any]) -> Any:
    for path, value in changes:
        place = document
        *outer, last = [path] if isinstance(path, str) else path
        for key in outer:
            place = place[key]
        place[last] = value
    return document


def outcome(folder: Path) -> list[str]:
    """["ran", ""] or ["refused", message], or ["escaped", exception] for an exception that is not Ingot's."""
    try:
        with Engine.load(
            open_artifact(folder, verify=True), kv_blocks=16, num_threads=2, max_batch_tokens=32
        ) as engine:
            engine.generate(list(_PROMPTS), SamplingParams(max_tokens=_STEPS, ignore_eos=True))
            engine.prompt_logits(_PROMPTS[1])
    except IngotError as error:
        return ["refused", str(error)[:300]]
    except BaseException as error:  # noqa: BLE001  # Rust panics are BaseExceptions
        return ["escaped", f"{type(error).__name__}: {str(error)[:300]}"]
    return ["ran", ""]


# ---- trying cases


@dataclass(frozen=True)
class Tried:
    """A case with its outcome, "refused", "ran", "escaped" or "died", and a message."""

    case: Case
    outcome: str
    message: str


@dataclass
class Trial:
    """Cases in the order in which they were tried."""

    tried: list[Tried] = field(default_factory=list)

    @property
    def outcomes(self) -> Counter[str]:
        """Numbers of cases."""
        return Counter(one.outcome for one in self.tried)

    @property
    def findings(self) -> list[Tried]:
        """The cases that were neither refused nor run."""
        return [one for one in self.tried if one.outcome not in ("refused", "ran")]

    def summary(self) -> dict[str, int]:
        """Numbers of cases, findings among them."""
        return {"tried": len(self.tried), **self.outcomes, "findings": len(self.findings)}


def try_cases(
    folder: Path, cases: Iterable[Case], environment: Mapping[str, str] | None = None, options: Sequence[str] = ()
) -> Trial:
    """Run the cases in workers with these options; another is started after one that dies of its case."""
    trial, worker = Trial(), None
    for case in cases:
        worker = worker or _Worker(folder, environment, options)
        answer = worker.run(case)
        if answer is None:
            answer, worker = ["died", worker.end()], None
        trial.tried.append(Tried(case, *answer))
    if worker is not None:
        worker.end()
    return trial


def kept_cases(name: str) -> dict[str, list[Case]]:
    """The cases of CORPUS for one of PROGRAMS, by their outcome."""
    kept: dict[str, list[Case]] = {}
    for case, outcome in json.loads(CORPUS.read_text()).get(name, []):
        kept.setdefault(outcome, []).append(case)
    return kept


def choose(trial: Trial) -> list[tuple[Case, str]]:
    """Those to keep: the first with each message, whatever its names and numbers are, and a few that run."""
    chosen, seen = list[tuple[Case, str]](), Counter[str]()
    for one in trial.tried:
        kind = re.sub(r"'[^']*'|-?\d+(\.\d+)?", "_", one.message.partition(":")[2]) or one.outcome
        if one.outcome in ("refused", "ran") and seen[kind] < (_MOST_THAT_RUN if one.outcome == "ran" else 1):
            seen[kind] += 1
            chosen.append((one.case, one.outcome))
    return chosen


class _Worker:
    """A process that runs cases, one at a time."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None, options: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # closed by end()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.program_fuzz", "--worker", str(folder), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )

    def run(self, case: Case) -> list[str] | None:
        """The outcome; None if the process died, or was killed as it took too long."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(CASE_SECONDS, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(case) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        return json.loads(line) if line else None

    def end(self) -> str:
        """End the process; return its exit status with the end of what it wrote to standard error."""
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            status = process.wait(CASE_SECONDS)
        with self._errors as errors:
            errors.seek(0)
            return f"exit status {status}: {errors.read()[-3000:]}"


def main(arguments: Sequence[str]) -> int:
    """Run the command; the exit status is 1 if there are findings."""
    if arguments[0] == "--worker":
        work(Path(arguments[1]), arguments[2:])
        return 0
    count, seed = int(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 0
    corpus, found = dict[str, list[tuple[Case, str]]](), False
    for name, (recipe, checkpoint) in PROGRAMS.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = build_program(Path(temporary), recipe, checkpoint)
            kept = itertools.chain.from_iterable(kept_cases(name).values()) if CORPUS.exists() else ()
            trial = try_cases(folder, itertools.chain(kept, Damager(folder).cases(seed, count)))
        print(name, json.dumps(trial.summary()), flush=True)
        for one in trial.findings:
            print(json.dumps(one.case), one.message, sep="\n")
        corpus[name], found = choose(trial), found or bool(trial.findings)
    lines = (f"{json.dumps(name)}: [\n{_lines(kept)}\n]" for name, kept in corpus.items())
    CORPUS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return int(found)


def _lines(values: Iterable[object]) -> str:
    return ",\n".join(map(json.dumps, values))


def build_program(folder: Path, recipe: str, checkpoint: str) -> Path:
    """Build an artifact in this folder; return its own."""
    # Workers do without them.
    from ingot.builder import build
    from tests.conftest import UNMEASURED

    target = folder / checkpoint / recipe
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        overrides = (f"checkpoint={FIXTURES / 'checkpoints' / checkpoint}", "cpu.engine=native", *UNMEASURED)
        build(recipe, overrides, target)
    return target


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
