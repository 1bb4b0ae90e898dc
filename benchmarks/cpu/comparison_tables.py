"""The tables of the comparison of CPU engines in docs/benchmarks.md, made from the JSON files alone.

    python -m benchmarks.cpu.comparison_tables      # makes them again

The goal of a cell: the faster of Ingot's engines has at least 1.3 times the speed of the fastest peer, or its decode
reads at least 90 % of the measured memory bandwidth. A ratio is the median over rounds of the ratio of the two speeds,
with a 95 % bootstrap interval; "open" means that the interval contains 1.3.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

import click

from benchmarks.cpu.cells import PARTS, WORK, Work
from benchmarks.cpu.comparison_results import DEFAULT_OUTPUT, PartResults
from benchmarks.cpu.rounds import interval
from benchmarks.hybrids import ALL_SHAPES, HybridShape
from benchmarks.paths import ROOT
from benchmarks.peers import ENGINES, PEERS, RECIPES

DOCUMENT = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- made by benchmarks.cpu.comparison_tables: begin -->", "<!-- end -->"
LEAST_RATIO = 1.3
LEAST_SHARE = 0.9
_MEBIBYTE = 1 << 20
_WITH_PEERS = [part for part in PARTS if part not in ("load", "recipes")]
Record = Mapping[str, Any]
Goal = Literal["met", "open", "not met"]


@dataclass(frozen=True)
class Comparison:
    """Ingot's faster engine and the fastest peer of a cell; `low` and `high` are None after a single round.

    share   of the memory bandwidth, of Ingot's engine; None for prefill and with neighbours
    """

    ours: str
    theirs: str
    ratio: float
    low: float | None
    high: float | None
    share: float | None

    @property
    def goal(self) -> Goal:
        """Compare the cell with its goal."""
        least, most = (self.ratio if end is None else end for end in (self.low, self.high))
        if least >= LEAST_RATIO or (self.share is not None and self.share >= LEAST_SHARE):
            return "met"
        return "open" if most >= LEAST_RATIO else "not met"


def compare(record: Record) -> Comparison | None:
    """The comparison of a cell; None where Ingot or all peers failed.

    Ingot's attention in bfloat16 counts only next to a peer that attends in bfloat16.
    """
    medians = {name: engine["median"] for name, engine in record["engines"].items()}
    theirs = max((name for name in medians if not PEERS[name].is_ours), key=medians.__getitem__, default=None)
    if theirs is None:
        return None
    equal = {"float32", PEERS[theirs].attention}
    ours = max(
        (name for name in medians if PEERS[name].is_ours and PEERS[name].attention in equal),
        key=medians.__getitem__,
        default=None,
    )
    if ours is None:
        return None
    return compare_engines(record, ours, theirs)


def compare_engines(record: Record, ours: str, theirs: str) -> Comparison | None:
    """The comparison of two engines, round by round; None where one of them failed."""
    engines = record["engines"]
    if not {ours, theirs} <= engines.keys():
        return None
    pairs = zip(engines[ours]["rounds"], engines[theirs]["rounds"], strict=True)
    ratios = [a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs]
    low, high = interval(ratios) if len(ratios) > 1 else (None, None)
    return Comparison(ours, theirs, statistics.median(ratios), low, high, bandwidth_share(record, engines[ours]))


def bandwidth_share(record: Record, engine: Record) -> float | None:
    """Bytes that decode reads per second over the cell's bandwidth; prefill is bound by arithmetic: None.

    A step reads the weights once for all sequences, and the keys and values of the tokens that the cell begins with.
    Of a mixture it reads only the experts that its tokens reach, of a hybrid it also reads and writes states; no record
    counts either: None.
    """
    shape = ALL_SHAPES[record["shape"]]
    if not record["steps"] or record["neighbours"] or shape.num_experts or isinstance(shape, HybridShape):
        return None
    facts = engine["facts"]
    cached = record["batch"] * record["prompt_tokens"]
    step_bytes = facts["weight_bytes"] + facts["kv_token_bytes"] * cached
    return float(step_bytes * engine["median"] / record["batch"] / record["bandwidth"])


def render(folder: Path) -> str:
    """All tables of a folder of results, in Markdown."""
    parts = {part: PartResults.load(folder, part) for part in PARTS}
    loads, recipes = parts["load"], parts["recipes"]
    records = _in_order(record for part in _WITH_PEERS for record in parts[part].records)
    with_peers = [*records, *loads.records]
    everything = [*with_peers, *recipes.records]
    if not everything:
        return "Not measured yet.\n"
    engines = [name for name in PEERS if any(name in (*each["engines"], *each["failed"]) for each in with_peers)]
    device = next(results.device for results in parts.values() if results.records)
    sections = [_machine(device, bandwidths([*records, *recipes.records]), everything)]
    if records:
        sections += [_speeds(records, engines), _processor_seconds(records, engines)]
    sections += [_load(record) for record in loads.records]
    sections += [_notes(with_peers, engines), _recipes(_in_order(recipes.records)), _failures(everything)]
    lines = "\n\n".join(section for section in sections if section).splitlines()
    return "\n".join(line if line.startswith("|") else _wrapped(line) for line in lines) + "\n"


def _wrapped(line: str) -> str:
    indent = "  " if line.startswith("* ") else ""
    return fill(line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def bandwidths(records: Iterable[Record]) -> dict[int, tuple[float, float]]:
    """Threads -> the lowest and the highest bandwidth that a cell measured."""
    found: dict[int, tuple[float, float]] = {}
    for record in records:
        low, high = found.get(record["threads"], (record["bandwidth"], record["bandwidth"]))
        found[record["threads"]] = min(low, record["bandwidth"]), max(high, record["bandwidth"])
    return found


def _in_order(records: Iterable[Record]) -> list[Record]:
    """By shape and threads, then as in the table of work."""
    shapes = list(ALL_SHAPES)
    return sorted(records, key=lambda record: (shapes.index(record["shape"]), record["threads"], _row_of(record)))


def _row_of(record: Record) -> int:
    names = ("part", "batch", "prompt_tokens", "steps", "neighbours")
    rows = [index for index, work in enumerate(WORK) if all(getattr(work, name) == record[name] for name in names)]
    return rows[0] if rows else len(WORK)


def _work(record: Record) -> Work:
    fields = {name: record[name] for name in ("part", "batch", "prompt_tokens", "steps", "neighbours")}
    return Work(**fields, budget=0)


def _machine(device: Record, read: Mapping[int, tuple[float, float]], records: Sequence[Record]) -> str:
    days = sorted({record["measured_at"][:10] for record in records})
    dates = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    memory = ", ".join(
        f"{low / 1e9:.1f} to {high / 1e9:.1f} GB/s with threads {count}" for count, (low, high) in sorted(read.items())
    )
    text = f" Memory reads at {memory}." if memory else ""
    return f"{device['processor']}, {device['cores']} cores, {device['system']}; measured {dates}.{text}"


def _speeds(records: Sequence[Record], engines: Sequence[str]) -> str:
    found = [compare(record) for record in records]
    goals = [comparison.goal for comparison in found if comparison]
    lines = [
        "Tokens per second of all sequences together: median (best), share of the memory bandwidth. Goals met in "
        f"{goals.count('met')} of {len(records)} cells, open in {goals.count('open')}. * marks a cell in which other "
        "processes disturbed a round.",
        "",
        *_header(("shape", "threads", "work", *(PEERS[name].label for name in engines), "Ingot / best peer", "goal")),
    ]
    for record, comparison in zip(records, found, strict=True):
        cells = [_speed(record, name) for name in engines]
        outcome = (_ratio(comparison), comparison.goal) if comparison else ("-", "not measured")
        lines.append(_row((record["shape"], record["threads"], _work(record), *cells, *outcome)))
    return "\n".join(lines)


def _speed(record: Record, name: str) -> str:
    if name not in record["engines"]:
        return "failed" if name in record["failed"] else "-"
    engine = record["engines"][name]
    share = bandwidth_share(record, engine)
    text = f"{_digits(engine['median'])} ({_digits(engine['best'])})"
    text += "*" if engine["disturbed_rounds"] and not record["neighbours"] else ""
    return text if share is None else f"{text} {share:.0%}"


def _ratio(comparison: Comparison) -> str:
    text = f"{comparison.ratio:.2f}"
    if comparison.low is None:
        return f"{text}, one round"
    return f"{text} ({comparison.low:.2f} to {comparison.high:.2f})"


def _processor_seconds(records: Sequence[Record], engines: Sequence[str]) -> str:
    lines = [
        "Processor seconds (user and system, whole process) for 1,000 tokens, medians:",
        "",
        *_header(("shape", "threads", "work", *(PEERS[name].label for name in engines))),
    ]
    for record in records:
        cells = [_seconds(record, name) for name in engines]
        lines.append(_row((record["shape"], record["threads"], _work(record), *cells)))
    return "\n".join(lines)


def _seconds(record: Record, name: str) -> str:
    seconds = record["engines"].get(name, {}).get("cpu_seconds_per_1000_tokens")
    return "-" if seconds is None else _digits(seconds)


def _load(record: Record) -> str:
    lines = [
        f"Loading {record['shape']}, threads {record['threads']}, files in the page cache: seconds to load, from the "
        "start of the process to the loaded model, and of a first token after 16; then memory in MiB after a prompt of "
        "512 tokens: the most resident, proportional (PSS), private, and in no file.",
        "",
        *_header(("engine", "load s", "process s", "first token s", "peak RSS", "PSS", "private", "anonymous")),
    ]
    for name, engine in record["engines"].items():
        seconds = [_digits(engine[each]) for each in ("load_seconds", "ready_seconds", "first_token_seconds")]
        memory = engine["memory"] or {}
        kinds = ("peak_rss_bytes", "pss_bytes", "private_bytes", "anonymous_bytes")
        sizes = [f"{memory[kind] / _MEBIBYTE:.0f}" if kind in memory else "-" for kind in kinds]
        lines.append(_row((PEERS[name].label, *seconds, *sizes)))
    return "\n".join(lines)


def _recipes(records: Sequence[Record]) -> str:
    """W8A8 and float16 weights on Ingot's engines, a row for each cell and recipe."""
    if not records:
        return ""
    engines = [name for name in ENGINES if any(name in record["engines"] for record in records)]
    lines = [
        "Other recipes on Ingot's two engines: tokens per second, median (best); processor seconds for 1,000 tokens.",
        "",
        *_header(
            ("shape", "threads", "work", "recipe", "native", "onnxruntime", "native / onnxruntime", "processor seconds")
        ),
    ]
    for record, name in ((record, name) for record in records for name in RECIPES):
        native, other = f"{name}-native", f"{name}-onnxruntime"
        if not {native, other} & {*record["engines"], *record["failed"]}:
            continue
        speeds = [_speed(record, engine) for engine in (native, other)]
        found = compare_engines(record, native, other)
        seconds = ", ".join(_seconds(record, engine) for engine in (native, other))
        outcome = _ratio(found) if found else "-"
        lines.append(
            _row((record["shape"], record["threads"], _work(record), RECIPES[name][0], *speeds, outcome, seconds))
        )
    return "\n".join([*lines, "", _notes(records, engines)])


def _failures(records: Sequence[Record]) -> str:
    reasons: dict[tuple[str, str], int] = {}
    for record in records:
        for each in record["failed"].items():
            reasons[each] = reasons.get(each, 0) + 1
    lines = [f"* {ENGINES[name].label} failed in {count} cells: {reason}" for (name, reason), count in reasons.items()]
    return "\n".join(lines)


def _notes(records: Sequence[Record], engines: Sequence[str]) -> str:
    lines = []
    for name in engines:
        found = [record["engines"][name]["facts"] for record in records if name in record["engines"]]
        if found:
            versions = ", ".join(f"{package} {number}" for package, number in found[-1]["versions"].items())
            lines.append(f"* {ENGINES[name].label}: {versions}. {found[-1]['notes']}")
    return "\n".join(lines)


def _digits(value: float) -> str:
    """Three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _header(columns: Sequence[object]) -> list[str]:
    return [_row(columns), "|" + "---|" * len(columns)]


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def write_tables(document: Path, folder: Path) -> None:
    """Replace what is between the markers of the document."""
    text = document.read_text("utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise click.ClickException(f"{document} has no lines {BEGIN!r} and {END!r} around the tables; add them")
    document.write_text(f"{before}{BEGIN}\n\n{render(folder)}\n{END}{after}", "utf-8")


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), default=DEFAULT_OUTPUT, help="Folder of the JSON files.")
@click.option("--document", type=click.Path(path_type=Path), default=DOCUMENT)
def main(output: Path, document: Path) -> None:
    """Write the tables."""
    write_tables(document, output)


if __name__ == "__main__":
    main()
