"""The page of `ingot plan --html`: the figures of the terminal, and a playground whose sliders change them.

The page has the coefficients of the step model for every way to share the model among devices. closed_form.js repeats
the formulas of planning/step_model.py, load.py and latency.py with them.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import count, takewhile
from typing import Any

from ingot.planning.hardware import Hardware
from ingot.planning.latency import Latency
from ingot.planning.load import Load
from ingot.planning.memory import sequence_bytes
from ingot.planning.model_shape import ModelShape
from ingot.planning.operations import Operation
from ingot.planning.parallelism import Parallelism, layouts
from ingot.planning.plan import ServingPlan, layout_steps
from ingot.planning.step_model import StepModel
from ingot.sizes import format_bytes
from ingot.validation.report.page import Page, PageControl, PagePanel, PageSection, PageTable

_SCRIPTS = ("closed_form.js", "drawing.js", "illustrations.js", "playground.js")
_SWEEP = ("Requests at a time", "TTFT ms", "TPOT ms", "Tokens/s", "Requests/s")
_MOST_STAGES = 4
_MOST_DRAFTED = 16
_LONGEST = (1, 1.5, 2, 3, 4, 6, 8)
_PANELS = (
    PagePanel("latency", "Latency", "Times of a request, and the terms of the average step with what binds each."),
    PagePanel("memory-panel", "Memory", "What one device holds while these requests run."),
    PagePanel("curve", "Throughput against latency", "Each dot is a number of requests at a time; the ring is yours."),
    PagePanel("batching", "Batching strategies", "Static batches wait for their longest output."),
    PagePanel("speculation", "Speculation", "Speedup by drafted tokens: a step verifies them, and drafting costs too."),
    PagePanel("levels", "Memory hierarchy", "What reading the KV of one such sequence takes where it is stored."),
    PagePanel("token-loop", "Token loop", "An illustration: the scores are made up, the times are those of the plan."),
    PagePanel("attention-tiles", "Attention tiles", "An illustration of one head; kernels use smaller tiles."),
    PagePanel("ways", "Parallelism", "The same load on other devices.", wide=True),
)


def plan_page(plan: ServingPlan, facts: Mapping[str, str]) -> Page:
    """The page of a plan.

    facts   the plan in words, as the terminal prints it
    """
    latency, memory, load = plan.latency, plan.memory, plan.load
    top = {"Hardware": plan.hardware.words}
    top["Devices"] = str(plan.parallelism) if plan.parallelism else "fits nowhere"
    top["Weights"] = format_bytes(memory.weights)
    if latency:
        top |= {
            "TTFT": f"{latency.ttft * 1e3:,.0f} ms",
            "TPOT": f"{latency.tpot * 1e3:,.1f} ms",
            "Throughput": f"{latency.tokens_per_second:,.0f} tokens/s",
        }
    if money := plan.money():
        top["Cost"] = f"${money['per_1000_tokens']:.5f} for 1,000 tokens"
    sections = [PageSection("facts", "The plan", facts=facts)]
    data: dict[str, Any] = {}
    if latency:
        section, data = _playground(plan)
        sections += [section, _speed(plan)]
    sections.append(_memory(plan))
    sections.append(_operations(plan))
    return Page(
        kind="Ingot plan",
        title=plan.subject.name,
        sentences=[
            f"{load.concurrency:,} requests at a time, each with a prompt of {load.prompt_tokens:,} tokens and an"
            f" output of {load.output_tokens:,}.",
            *([plan.verdict[0].upper() + plan.verdict[1:] + "."] if plan.verdict else []),
        ],
        facts=top,
        sections=sections,
        sources=f"Sizes: {plan.subject.source}. Times: {plan.step_model.source}.",
        verdict=_verdict(plan),
        scripts=[read_script(name) for name in _SCRIPTS] if data else (),
        data=data,
    )


def _verdict(plan: ServingPlan) -> str:
    words = {"meets": "PASS", "does": "FAIL", "undecided": "UNDECIDED"}
    return words.get(plan.verdict.split(" ")[0], "")


def _speed(plan: ServingPlan) -> PageSection:
    error = plan.step_model.relative_error
    sweep = [(f"{one.load.concurrency:,}", *latency_cells(one)) for one in plan.sweep]
    tables = [PageTable("Predictions for other numbers of requests.", _SWEEP, sweep)]
    if plan.alternatives:
        rows = [(str(way), *latency_cells(found)) for way, found in plan.alternatives]
        tables.append(PageTable("Ways to share the model among as many devices.", ("Way", *_SWEEP[1:]), rows))
    note = f"Times are predicted with a 95 % interval of ±{error:.0%}."
    return PageSection("speed", "Speed", note, tables=tables)


def latency_cells(one: Latency) -> tuple[str, ...]:
    """Return TTFT and TPOT in ms, tokens and requests per second."""
    return (
        f"{one.ttft * 1e3:,.0f}",
        f"{one.tpot * 1e3:,.2f}",
        f"{one.tokens_per_second:,.0f}",
        f"{one.requests_per_second:,.2f}",
    )


def _memory(plan: ServingPlan) -> PageSection:
    memory = plan.memory
    parts = {
        "weights": memory.weights,
        "KV pool": memory.pool,
        "side state": memory.states,
        "arena": memory.arena,
        "context and graphs": memory.context,
        "other": memory.other,
        "left": max(0, memory.total - memory.used),
    }
    found = {name: size for name, size in parts.items() if size}
    rows = [(name, f"{size:,}", f"{size / memory.total:.1%}") for name, size in found.items()]
    return PageSection(
        "memory",
        "Memory",
        memory.reason,
        tables=[PageTable("Bytes of one device.", ("Part", "Bytes", "Share"), rows)],
    )


def operation_cells(one: Operation) -> tuple[str, ...]:
    """Return an operation's name, what limits it, MB, GFLOP, FLOP/byte, their threshold, and the rows of a change."""
    return (
        one.name,
        one.regime,
        f"{one.bytes / 1e6:,.1f}",
        f"{one.flops / 1e9:,.1f}",
        f"{one.intensity:,.1f}",
        f"{one.threshold:,.0f}",
        f"{one.change_at:,}" if one.change_at else "never",
    )


def _operations(plan: ServingPlan) -> PageSection:
    rows = [operation_cells(one) for one in plan.operations]
    header = ("Operation", "Limited by", "MB", "GFLOP", "FLOP/byte", "Threshold", "Compute from")
    note = (
        "An operation whose FLOP/byte are below the threshold waits for memory; it is limited by arithmetic from that"
        " number of rows on."
    )
    table = PageTable("What limits each operation of a decode step.", header, rows, left=2)
    return PageSection("operations", "Operations", note, tables=[table])


@cache
def read_script(name: str) -> str:
    """Return a script of the pages."""
    return (files("ingot.builder.pages") / name).read_text("utf-8")


def _playground(plan: ServingPlan) -> tuple[PageSection, dict[str, Any]]:
    """Return the section, and the coefficients that its script reads."""
    is_data_sheet = plan.step_model == layout_steps(plan.subject, plan.hardware, plan.load, plan.parallelism)
    ways = list(_ways(plan, is_data_sheet))
    note = (
        f"Predicted by the model of a step of this plan, with a 95 % interval of ±{plan.step_model.relative_error:.0%};"
        " this page computes it while you move a slider. Drafts cost nothing except where a cost of theirs is shown."
    )
    section = PageSection("playground", "Playground", note, controls=_controls(plan, ways), panels=_PANELS)
    models = [list(_models(plan, way)) if is_data_sheet else [plan.step_model] for way in ways]
    return section, {"plan": _coefficients(plan, ways, models)}


def _coefficients(
    plan: ServingPlan, ways: Sequence[Parallelism], models: Sequence[Sequence[StepModel]]
) -> dict[str, Any]:
    """Return what the script reads; `models` are those of each way, by the number of microbatches."""
    kv, level = plan.subject.shape.kv, plan.level[1] if plan.level else None
    return {
        "context_tokens": plan.subject.model.context_tokens,
        "max_sequences": plan.subject.program.max_sequences,
        "memory_bytes": plan.memory.total,
        "block_tokens": kv.block_tokens,
        "block_bytes": kv.block_bytes,
        "state_bytes": kv.state_bytes,
        "relative_error": plan.step_model.relative_error,
        "level": {"ttft": level.ttft, "tpot": level.tpot, "endToEnd": level.end_to_end} if level else None,
        "levels": _levels(plan.hardware),
        "window": min((layer.window for layer in kv.layers if layer.window), default=0),
        "query_heads": max(plan.subject.shape.query_heads),
        "ways": [_way(plan, way, of_way) for way, of_way in zip(ways, models, strict=True)],
    }


def _levels(hardware: Hardware) -> list[tuple[str, float]]:
    """Return levels of memory with their bytes a second, the nearest first."""
    levels = [("device memory", hardware.bandwidth), ("host memory", hardware.host_link), ("network", hardware.network)]
    if hardware.devices > 1:
        levels.insert(1, ("another device of the node", hardware.link))
    return levels


def _ways(plan: ServingPlan, is_data_sheet: bool) -> Iterator[Parallelism]:
    """Yield ways to share the model, the fewest devices first; of a measured step model, the plan's own alone."""
    chosen = plan.parallelism
    assert chosen
    if not is_data_sheet:
        yield chosen
        return
    shape, node = plan.subject.shape, plan.hardware.devices
    most = max(2 * node, chosen.devices)
    found = takewhile(lambda way: way.devices <= most, layouts(shape, plan.hardware, plan.load.total_tokens))
    for way in found:
        if way.pipeline <= _MOST_STAGES or _is_same(way, chosen):
            yield way


def _is_same(one: Parallelism, other: Parallelism) -> bool:
    return (one.tensor, one.pipeline, one.expert) == (other.tensor, other.pipeline, other.expert)


def _way(plan: ServingPlan, way: Parallelism, models: Sequence[StepModel]) -> dict[str, Any]:
    shape, memory = plan.subject.shape, plan.memory
    alone = way.devices == 1
    size = sequence_bytes(shape, plan.load.total_tokens)
    copies = max(1.0, way.tensor / max(layer.num_kv_heads for layer in shape.kv.layers))
    return {
        "words": str(way),
        "devices": way.devices,
        "weights": memory.weights if alone else _device_weights(shape, way),
        "arena": memory.arena if alone else 0,
        "other": memory.context + memory.other if alone else 0,
        "blocks": memory.num_blocks if alone else None,
        "states": memory.states,
        "state_slots": memory.state_slots,
        "kv_bytes": way.sequences * size,
        "copies": copies,
        "models": [_terms(model) for model in models],
    }


def _models(plan: ServingPlan, way: Parallelism) -> Iterator[StepModel]:
    """Yield the data sheet's step models of a way, by the number of microbatches."""
    for microbatches in range(1, way.pipeline + 1):
        yield layout_steps(plan.subject, plan.hardware, Load(concurrency=microbatches), way)


def _device_weights(shape: ModelShape, way: Parallelism) -> float:
    """Bytes of the weights that one device holds."""
    others = shape.matmul_bytes - shape.expert_bytes + shape.embedding_bytes
    return others / (way.tensor * way.pipeline) + shape.expert_bytes / way.devices


def _terms(model: StepModel) -> list[list[Any]]:
    return [
        [term.name, [[use.resource, use.count, use.seconds, use.reach] for use in term.uses]] for term in model.parts
    ]


def _controls(plan: ServingPlan, ways: Sequence[Parallelism]) -> list[PageControl]:
    load, context = plan.load, plan.subject.model.context_tokens
    assert plan.parallelism
    start = next(at for at, way in enumerate(ways) if _is_same(way, plan.parallelism))
    cached = round(100 * load.cached_tokens / load.prompt_tokens)
    acceptance = round(100 * load.acceptance, 1) if load.drafted_tokens else 70.0
    return [
        PageControl("way", "Devices", range(len(ways)), start, [str(way) for way in ways]),
        slider("concurrency", "Requests at a time", rounded(4 * plan.subject.program.max_sequences), load.concurrency),
        slider("prompt", "Tokens of a prompt", rounded(context - 1), load.prompt_tokens),
        slider("output", "Tokens of an output", rounded(context - 1), load.output_tokens),
        slider("cached", "Of a prompt, cached", range(0, 100, 5), cached, "%"),
        slider("drafted", "Drafted tokens of a step", range(_MOST_DRAFTED + 1), load.drafted_tokens),
        slider("acceptance", "Drafts that are right", range(0, 101, 5), acceptance, "%"),
        slider("cost", "Drafting a token, of a plain step", (0, 1, 2, 5, 10, 15, 20, 30, 50), 0, "%"),
        slider("longest", "Longest output of a static batch, times the mean", _LONGEST, 2),
        slider("temperature", "Temperature of the token loop", [step / 10 for step in range(21)], 1.0),
        slider("top", "Its top-p", range(10, 101, 5), 100, "%"),
    ]


def slider(name: str, label: str, values: Sequence[float], start: float, unit: str = "") -> PageControl:
    """Return a slider that starts at a value, which is added where it is missing."""
    places = sorted({*values, start})
    return PageControl(name, label, places, places.index(start), unit=unit)


def rounded(most: int) -> list[int]:
    """Return round numbers up to a limit, which is the last: 1, 2, 3, 4, 6, 8, 12, 16."""
    found = (size for power in count() for size in (2**power, 3 * 2 ** (power - 1)) if isinstance(size, int))
    return sorted({*takewhile(lambda size: size < most, found), most})
