"""The tables of the comparison of CPU engines in docs/benchmarks.md, made from the JSON files alone.

    python -m benchmarks.cpu.comparison_tables      # makes them again, and the range over processors in README.md

Each processor has a section with its tables. See comparison_ratios.py for ratios and goals.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import click

from benchmarks.cpu.cells import PARTS, WORK, Work
from benchmarks.cpu.comparison_ratios import Comparison, Record, bandwidth_share, compare, compare_engines
from benchmarks.cpu.comparison_results import DEFAULT_OUTPUT, ProcessorResults, all_results
from benchmarks.hybrids import ALL_SHAPES
from benchmarks.paths import ROOT
from benchmarks.peers import ENGINES, PEERS, RECIPES
from benchmarks.shapes import SHAPES

DOCUMENT, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
BEGIN, END = "<!-- made by benchmarks.cpu.comparison_tables: begin -->", "<!-- end -->"
_MEBIBYTE = 1 << 20
_WITH_PEERS = [part for part in PARTS if part not in ("load", "recipes")]
# The range in README.md covers cells of an otherwise idle machine with dense models, which all peers run.
_SUMMARY = {"decode": ("decode", "context"), "prompts": ("prefill",)}
_DENSE = frozenset(name for name, shape in SHAPES.items() if not shape.num_experts)
# What a record says of an engine, and the word that a table has for the latter two.
_KINDS = ("engines", "failed", "missing")


def render(folder: Path) -> str:
    """All tables of a folder of results, in Markdown: a section for each processor."""
    sections = [_processor(results) for results in all_results(folder) if results.records]
    if not sections:
        return "Not measured yet.\n"
    lines = "\n\n".join(sections).splitlines()
    return "\n".join(line if line.startswith("|") else _wrapped(line) for line in lines) + "\n"


def _processor(results: ProcessorResults) -> str:
    records = _in_order(results.of(*_WITH_PEERS))
    loads, recipes = results.of("load"), _in_order(results.of("recipes"))
    with_peers = [*records, *loads]
    everything = [*with_peers, *recipes]
    engines = [name for name in PEERS if any(name in each[kind] for each in with_peers for kind in _KINDS)]
    sections = [
        f"### {results.device['processor']}",
        _machine(results.device, bandwidths([*records, *recipes]), everything),
    ]
    if records:
        sections += [_speeds(records, engines), _processor_seconds(records, engines)]
    sections += [_load(record) for record in loads]
    sections += [_notes(with_peers, engines), _recipes(recipes), _failures(everything)]
    return "\n\n".join(section for section in sections if section)


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
    return f"{device['cores']} cores, {device['system']}; measured {dates}.{text}"


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
        return next((kind for kind in _KINDS if name in record[kind]), "-")
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
    seconds = record["engines"].get(name, {}).get("cpu_seconds_per_1000_tokens")  # None: not reported by the engine
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
    """Each reason for which an engine has no figure, with its cells."""
    cells: dict[tuple[str, str, str], list[str]] = {}
    for record in records:
        for kind in ("failed", "missing"):
            for name, reason in record[kind].items():
                cells.setdefault((name, kind, reason), []).append(_cell_name(record))
    lines = []
    for (name, kind, reason), found in cells.items():
        where = "all cells" if len(found) == len(records) else "; ".join(found)
        lines.append(f"* {ENGINES[name].label} {kind} in {where}: {reason}")
    return "\n".join(lines)


def _cell_name(record: Record) -> str:
    work = "loading" if record["part"] == "load" else _work(record)
    return f"{record['shape']}, threads {record['threads']}, {work}"


def _notes(records: Sequence[Record], engines: Sequence[str]) -> str:
    lines = []
    for name in engines:
        found = [record["engines"][name]["facts"] for record in records if name in record["engines"]]
        if found:
            versions = ", ".join(f"{package} {number}" for package, number in found[-1]["versions"].items())
            lines.append(
                f"* {ENGINES[name].label}: {versions}. {found[-1]['notes']}{_pages(found)}{_left_out(records, name)}"
            )
    return "\n".join(lines)


def _left_out(records: Sequence[Record], name: str) -> str:
    """Parts of the records that an engine cannot run."""
    parts = dict.fromkeys(record["part"] for record in records if not ENGINES[name].runs(record["part"]))
    return f"; cannot run: {', '.join(parts)}" if parts else ""


def _pages(facts: Sequence[Mapping[str, Any]]) -> str:
    """The least that a process had in huge pages, next to its largest weights: one shape's, where both are known."""
    shares = [each["huge_bytes"] / each["weight_bytes"] for each in facts if "huge_bytes" in each]
    return f"; in huge pages: {min(shares):.2f} times the weights' bytes or more" if shares else ""


def _digits(value: float) -> str:
    """Three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _header(columns: Sequence[object]) -> list[str]:
    return [_row(columns), "|" + "---|" * len(columns)]


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def summarize(folder: Path) -> str:
    """Lowest and highest ratio to the fastest peer on each processor and on all, and the cells that Ingot loses."""
    lines = _header(("CPU", "peers", *_SUMMARY, "cells in which a peer is faster"))
    rows = [(results.device["processor"], results.records) for results in all_results(folder)]
    if len(rows) > 1:
        rows.append(("all", [record for _, records in rows for record in records]))
    for name, records in rows:
        found = {kind: _ratios(records, parts) for kind, parts in _SUMMARY.items()}
        ratios = [ratio for each in found.values() for ratio in each]
        if ratios:
            ranges = [f"{min(each):.2f} to {max(each):.2f}" if each else "-" for each in found.values()]
            lines.append(
                _row((name, _programs(records), *ranges, f"{sum(ratio < 1 for ratio in ratios)} of {len(ratios)}"))
            )
    return "\n".join(lines) + "\n" if len(lines) > 2 else "Not measured yet.\n"


def _programs(records: Iterable[Record]) -> str:
    """Names of the peers that were measured, each once: the first words of their labels."""
    measured = {name for record in records for name in record["engines"]}
    names = [row.label.split()[0] for name, row in PEERS.items() if name in measured and not row.is_ours]
    return ", ".join(dict.fromkeys(names))


def _ratios(records: Iterable[Record], parts: Sequence[str]) -> list[float]:
    chosen = [compare(record) for record in records if record["part"] in parts and record["shape"] in _DENSE]
    return [comparison.ratio for comparison in chosen if comparison]


def write_tables(document: Path, folder: Path) -> None:
    """Replace what is between the markers of the document."""
    _replace_marked(document, render(folder))


def write_summary(document: Path, folder: Path) -> None:
    """Replace what is between the markers of the document by the range over processors."""
    _replace_marked(document, summarize(folder))


def _replace_marked(document: Path, made: str) -> None:
    text = document.read_text("utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise click.ClickException(f"{document} has no lines {BEGIN!r} and {END!r} around the tables; add them")
    document.write_text(f"{before}{BEGIN}\n\n{made}\n{END}{after}", "utf-8")


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), default=DEFAULT_OUTPUT, help="Folder of the JSON files.")
@click.option("--document", type=click.Path(path_type=Path), default=DOCUMENT)
@click.option("--readme", type=click.Path(path_type=Path), default=README)
def main(output: Path, document: Path, readme: Path) -> None:
    """Write the tables."""
    write_tables(document, output)
    write_summary(readme, output)


if __name__ == "__main__":
    main()
