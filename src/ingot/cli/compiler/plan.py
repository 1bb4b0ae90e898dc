"""`ingot plan`: memory, speed and cost of a model on hardware, before anything is built or rented."""

from dataclasses import replace
from pathlib import Path

from ingot.artifact import MANIFEST, open_artifact
from ingot.builder.pages.plan_page import latency_cells, operation_cells, plan_page
from ingot.builder.plan_advice import Advice, DataClass, Hosting, advise, advise_hosting
from ingot.cli.evidence import print_scoreboard
from ingot.cli.terminal.console import print_json, print_line, print_note
from ingot.cli.terminal.tables import print_facts, print_table
from ingot.errors import UsageError, shown_path
from ingot.planning.choice.alerts import write_alert_rules
from ingot.planning.hardware import Hardware, find_hardware, hardware_rows
from ingot.planning.latency import Latency
from ingot.planning.load import Load
from ingot.planning.measuring import as_hardware, measure
from ingot.planning.memory import sequence_bytes
from ingot.planning.plan import PlannedModel, ServingPlan, make_plan
from ingot.planning.serving_rows import fit_rows, read_rows
from ingot.planning.simulation.figures import parse_service_level
from ingot.planning.step_model import StepModel
from ingot.runtime.executors import load_executor
from ingot.runtime.options import EngineOptions, free_memory_bytes
from ingot.sizes import format_bytes
from ingot.validation.report.page import write_page

_OUTPUT_SHARE = 4
"""One token in so many of --context is output."""


def plan_command(
    what: str | None,
    hardware_name: str | None,
    recipe: str | None,
    checkpoint: Path | None,
    overrides: tuple[str, ...],
    context: int | None,
    prompt: int | None,
    output: int | None,
    batch: int,
    cached: int,
    drafted: int,
    acceptance: float,
    slo: str | None,
    devices: int | None,
    price: float | None,
    api_price: float | None,
    rows_file: Path | None,
    is_measured: bool,
    hardware_files: tuple[Path, ...],
    explain: bool,
    with_advice: bool,
    tokens_a_day: float | None,
    data: DataClass | None,
    team: int | None,
    scoreboard: Path | None,
    alerts: Path | None,
    page: Path | None,
    as_json: bool,
) -> None:
    """Plan WHAT on hardware; without WHAT, list the hardware, score the predictions of a folder, or write alerts."""
    if scoreboard is not None:
        if what is not None:
            raise UsageError("--scoreboard scores predictions of builds, not a plan: leave out WHAT")
        print_scoreboard(scoreboard, as_json)
        return
    level = (slo, parse_service_level(slo)) if slo else None
    if alerts is not None:
        if level is None:
            raise UsageError("--alerts writes the alerts of a service level: name it, such as --slo chat")
        write_alert_rules(alerts, *level)
        print_note(f"wrote {shown_path(alerts)}")
    if what is None:
        if alerts is None:
            _list_hardware(hardware_files)
        return
    _refuse_contradictions(what, hardware_name, rows_file, is_measured)
    hardware = find_hardware(hardware_name, hardware_files) if hardware_name else None
    from ingot.builder.plan_subject import read_subject  # needs the compiler's packages; the list does not

    named = [f"checkpoint={checkpoint}"] if checkpoint else []
    subject = read_subject(what, recipe, [*named, *overrides], on_cpu=hardware is not None and hardware.kind == "cpu")
    lengths = _load(context, prompt, output, slo, subject.model.context_tokens)
    load = replace(lengths, concurrency=batch, cached_tokens=cached, drafted_tokens=drafted, acceptance=acceptance)
    measured = _fitted(rows_file, subject)
    if hardware is None:
        measured, hardware = _measured(Path(what), subject)
    elif subject.program.on_cpu != (hardware.kind == "cpu"):
        kind = "a CPU" if subject.program.on_cpu else "a GPU"
        raise UsageError(
            f"{subject.name} is for {kind}, and {hardware_name} is {hardware.words}: name other hardware, or a recipe"
            " for this one"
        )
    plan = make_plan(
        subject,
        hardware_name or "here",
        hardware,
        load,
        level=level,
        devices=devices,
        measured=measured,
        price=price,
        api_price=api_price,
    )
    if page:
        write_page(page, plan_page(plan, _facts(plan)))
    asked = with_advice or any(one is not None for one in (tokens_a_day, data, team))
    advice = (advise(plan), advise_hosting(plan, tokens_a_day, data, team)) if asked else None
    if as_json:
        given = {"advice": [one.as_json() for one in advice[0]], "hosting": advice[1].as_json()} if advice else {}
        print_json({**plan.as_json(), **given})
    else:
        _print(plan, explain)
        if advice:
            _print_advice(*advice)


def _load(context: int | None, prompt: int | None, output: int | None, slo: str | None, longest: int) -> Load:
    """The load: of --context a quarter is output; else prompt and output are those of the service level.

    longest   the model's context, which is the load's where no length is given and the service level's do not fit
    """
    level = parse_service_level(slo or "chat")
    if context is prompt is output is None and longest < level.prompt_tokens + level.output_tokens:
        context = longest
    if context is not None and (prompt is not None or output is not None):
        raise UsageError("--context is prompt and output together: give it, or --prompt and --output")
    if context is not None:
        if context < 2:
            raise UsageError(f"--context is {context}; it must be at least 2, a token of prompt and one of output")
        output = max(1, context // _OUTPUT_SHARE)
        prompt = context - output
    return Load(prompt_tokens=prompt or level.prompt_tokens, output_tokens=output or level.output_tokens)


def _refuse_contradictions(what: str, hardware: str | None, rows: Path | None, is_measured: bool) -> None:
    if is_measured and (hardware is not None or rows is not None):
        raise UsageError("--measure measures steps on this machine: leave out --on and --rows")
    if is_measured and not (Path(what) / MANIFEST).is_file():
        raise UsageError(f"--measure runs an artifact, and {what} is not one: build it first, or plan with --on")
    if not is_measured and hardware is None:
        raise UsageError(
            "name the hardware with --on, such as --on h100; `ingot plan` without arguments lists all. With --measure"
            " an artifact is measured on this machine"
        )


def _fitted(file: Path | None, subject: PlannedModel) -> StepModel | None:
    """A step model of rows that were measured elsewhere; None for the data sheet's."""
    if file is None:
        return None
    rows = read_rows(file)
    return fit_rows(rows, f"{len(rows)} measured rows of {file}", subject.shape.experts)


def _measured(artifact: Path, subject: PlannedModel) -> tuple[StepModel, Hardware]:
    """Measure the artifact's steps on this machine; return them, and the machine as a row."""
    executor = load_executor(open_artifact(artifact), EngineOptions())
    try:
        model = measure(executor, subject.shape.experts)
        memory = executor.device.total_bytes if executor.device else free_memory_bytes()
    finally:
        executor.close()
    return model, as_hardware(model, subject.shape, memory, subject.program.on_cpu)


def _list_hardware(files: tuple[Path, ...]) -> None:
    rows = [
        (
            name,
            one.words,
            format_bytes(one.memory),
            f"{one.bandwidth / 1e9:,.0f}",
            f"{one.peak('fp16')[1] / 1e12:,.0f}",
            f"{one.intensity('fp16'):.0f}",
            f"{one.watts:.0f}" if one.watts else "-",
            f"{one.price_per_hour:.2f}" if one.price_per_hour else "-",
        )
        for name, one in hardware_rows(files).items()
    ]
    header = ("name", "hardware", "memory", "GB/s", "fp16 TFLOP/s", "flop/byte", "W", "$/h")
    print_table("Hardware", header, rows, left=2)


def _print(plan: ServingPlan, explain: bool) -> None:
    print_facts(_facts(plan))
    if plan.alternatives:
        ways = [(str(way), *_sweep_row(latency)) for way, latency in plan.alternatives]
        print_table("Ways to share the model among as many devices", ("way", *_SWEEP), ways, left=1)
    if plan.sweep:
        print_table("At other numbers of requests", _SWEEP, [_sweep_row(one) for one in plan.sweep])
    if explain:
        _print_explanation(plan)


def _facts(plan: ServingPlan) -> dict[str, str]:
    subject, memory, load = plan.subject, plan.memory, plan.load
    kv, tokens = subject.shape.kv, load.total_tokens
    fitting = plan.parallelism.sequences if plan.parallelism else 0
    facts = {
        "model": f"{subject.name}: {subject.model.family}, {subject.model.num_parameters:,} parameters",
        "sizes from": subject.source,
        "hardware": f"{plan.hardware.words} ({'; '.join(plan.hardware.sources)})",
        "load": f"{load.concurrency} at a time: prompts of {load.prompt_tokens:,} tokens, outputs of"
        f" {load.output_tokens:,}",
        "weights": f"{format_bytes(memory.weights)} ({memory.weights:,} bytes)",
        **({"placed on": "; ".join(map(str, subject.program.parts))} if subject.program.parts else {}),
        "KV": f"{kv.type_in_words}, {plan.subject.shape.kv_token_bytes:,.0f} bytes a token, {kv.block_bytes:,} a block"
        f" of {kv.block_tokens}; {format_bytes(sequence_bytes(subject.shape, tokens))} for {tokens:,} tokens",
        "pool": _pool(plan),
        "devices": str(plan.parallelism) if plan.parallelism else "fits nowhere: not on 64 nodes",
        "sequences": f"{fitting:,.0f} of {tokens:,} tokens fit; a step has up to {subject.program.max_sequences}",
    }
    return facts | _speed(plan) | _money(plan)


def _pool(plan: ServingPlan) -> str:
    """The engine's blocks on one device, or what all devices of a model that one does not hold have room for."""
    memory, ways = plan.memory, plan.parallelism
    if ways is None or ways.devices == 1:
        return f"{memory.num_blocks:,} blocks, {memory.pool_tokens:,} tokens ({memory.reason})"
    room = ways.sequences * plan.load.total_tokens
    alone = f"{memory.num_blocks:,} blocks on one alone" if memory.num_blocks else "one alone does not hold the model"
    return f"{room:,.0f} tokens over {ways.devices} devices ({alone})"


def _speed(plan: ServingPlan) -> dict[str, str]:
    latency, model, first = plan.latency, plan.step_model, plan.terms[0]
    if latency is None:
        return {}
    facts = {
        "times from": f"{model.source}; 95 % interval of ±{model.relative_error:.0%}",
        "TTFT": f"{latency.ttft * 1e3:,.1f} ms",
        "TPOT": f"{latency.tpot * 1e3:,.2f} ms, of which {latency.itl * 1e3:,.2f} ms while no prompt is computed",
        "throughput": f"{latency.tokens_per_second:,.0f} tokens/s, {latency.requests_per_second:,.2f} requests/s",
        "bound by": f"{first.resource} in {first.name}, {first.seconds / latency.tpot:.0%} of a step",
    }
    for way, found in plan.disaggregation.items():
        does = "pays" if found.pays else "does not pay"
        facts[f"split by {way}"] = (
            f"computing prompts on other devices {does}: {format_bytes(found.transfer_bytes)} of KV take"
            f" {found.transfer_seconds * 1e3:,.1f} ms, prompts add {found.interference_seconds * 1e3:,.1f} ms to a"
            " request's decoding"
        )
    if plan.joules_per_token is not None:
        facts["energy"] = f"{plan.joules_per_token:,.2f} J a token at the power limit"
    return facts | ({"service level": plan.verdict} if plan.verdict else {})


def _money(plan: ServingPlan) -> dict[str, str]:
    money = plan.money()
    if not money:
        return {}
    text = (
        f"${money['per_1000_tokens']:.5f} for 1,000 tokens, ${money['per_request']:.5f} a request, "
        f"${money['per_month']:,.0f} a month at ${money['price_per_hour']:.2f}/h ({money['source']})"
    )
    if "break_even_tokens_a_day" in money:
        text += f"; the API costs more from {money['break_even_tokens_a_day'] / 1e6:,.1f} M tokens a day on"
    return {"money": text}


_SWEEP = ("at a time", "TTFT ms", "TPOT ms", "tokens/s", "requests/s")


def _sweep_row(one: Latency) -> tuple[str, ...]:
    return (f"{one.load.concurrency}", *latency_cells(one))


def _print_explanation(plan: ServingPlan) -> None:
    """The terms of the average step, then what limits each operation, with units."""
    terms = [(term.name, term.resource, f"{term.seconds * 1e3:,.3f}") for term in plan.terms if term.seconds]
    print_table("Terms of the average step", ("term", "bound by", "ms"), terms, left=2)
    rows = [(*operation_cells(one), f"{one.seconds * 1e6:,.1f}") for one in plan.operations]
    header = ("operation", "limited by", "MB", "GFLOP", "FLOP/byte", "threshold", "compute from", "us ideal")
    print_table("Operations of a decode step", header, rows, left=2)
    memory = plan.memory
    print_line(
        f"{memory.total:,} bytes = weights {memory.weights:,} + arena {memory.arena:,} + context {memory.context:,} +"
        f" pool {memory.num_blocks:,} x {memory.block_bytes:,} + side state {memory.states:,} + other"
        f" {memory.other:,} + left {memory.total - memory.used:,}"
    )


def _print_advice(advice: list[Advice], hosting: Hosting) -> None:
    rows = [
        (
            str(one.step or "-"),
            one.name,
            one.effort,
            f"{one.together:.2f}x" if one.step else "-",
            f"{one.throughput:.2f}x",
            f"{one.tpot:.2f}x",
            f"{one.sequences:.2f}x",
            one.why,
        )
        for one in advice
    ]
    header = ("", "optimization", "by", "so far", "alone", "TPOT", "sequences", "why")
    print_table("Optimizations in order: tokens/s after each step, and of each alone", header, rows, left=3)
    for one in advice:
        print_note(f"{one.name}: {one.needs}")
    print_facts({"advice": hosting.choice, **{f"reason {n}": why for n, why in enumerate(hosting.reasons, 1)}})
    if hosting.bands:
        costs = [
            (
                f"{band.tokens_a_day / 1e6:,.6g} M",
                str(band.replicas),
                f"{band.own:,.0f}",
                "-" if band.api is None else f"{band.api:,.0f}",
                band.cheaper or "-",
            )
            for band in hosting.bands
        ]
        print_table("A month, by tokens a day", ("a day", "replicas", "own $", "API $", "cheaper"), costs, left=0)
