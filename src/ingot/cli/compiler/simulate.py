"""`ingot simulate`: traffic through engines in virtual time."""

import os
import sys
import webbrowser
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from typing import Any, get_args

from ingot.artifact import open_artifact
from ingot.builder.pages.recording import Recording
from ingot.builder.pages.simulation_page import simulation_page
from ingot.builder.plan_subject import read_subject
from ingot.cli.engine_options import engine_options
from ingot.cli.sources import kind_of
from ingot.cli.terminal.console import print_json, print_line, print_note
from ingot.cli.terminal.tables import print_table
from ingot.errors import UsageError, shown_path, unknown
from ingot.planning.hardware import Hardware, find_hardware
from ingot.planning.measuring import measure
from ingot.planning.memory import plan_memory
from ingot.planning.plan import PlannedModel
from ingot.planning.service_levels import LevelBounds
from ingot.planning.simulation.deployment import Capacity, Deployment, capacity, knee, sweep, sweep_rates
from ingot.planning.simulation.disaggregation import ReplicaPools
from ingot.planning.simulation.figures import Figures, Quantiles, parse_service_level
from ingot.planning.simulation.fleet import Autoscaling, drains_of, failures_of
from ingot.planning.simulation.layer_profile import LayerProfile
from ingot.planning.simulation.regions import UserRegion, regions_of
from ingot.planning.simulation.simulated_executor import EngineShape, StepPredictor
from ingot.planning.simulation.simulated_tiers import PCIE, CopyLink
from ingot.planning.simulation.traffic import RequestSizes, Traffic, parse_traffic
from ingot.planning.step_model import Count, StepModel, Term, Use
from ingot.runtime.executors import OffloadingExecutor, load_executor, num_fast_blocks
from ingot.runtime.options import EngineOptions
from ingot.runtime.slow_part import resolve_slow_part
from ingot.validation.report.page import write_page


def simulate_command(
    what: str,
    hardware: str | None,
    hardware_file: Path | None,
    recipe: str | None,
    steps: str | None,
    profile: Path | None,
    is_measured: bool,
    tensor_parallel: int,
    load: str,
    requests: int | None,
    speed: float,
    scale: float,
    sizes: Mapping[str, Any],
    seed: int,
    slo: str,
    settings: tuple[str, ...],
    acceptance: str | None,
    timeout: float | None,
    replicas: int,
    router: str,
    autoscale: int | None,
    scaling_rule: str,
    open_per_replica: float,
    startup_seconds: float,
    fail: tuple[str, ...],
    drain: tuple[str, ...],
    disaggregate: str | None,
    kv_link: float | None,
    region: tuple[str, ...],
    find_capacity: bool,
    page: Path | None,
    opens: bool,
    as_json: bool,
) -> None:
    """Simulate and print."""
    if opens and (page or as_json or find_capacity):
        raise UsageError("--open serves a page with every figure: leave out --html, --json and --capacity")
    level, options = parse_service_level(slo), EngineOptions(**engine_options(settings))  # type: ignore[arg-type]
    device = find_hardware(hardware, (hardware_file,) if hardware_file else ()) if hardware else None
    _refuse_contradictions(device, steps, profile, is_measured)
    subject = read_subject(what, recipe, on_cpu=device is not None and device.kind == "cpu")
    engine = _engine(subject, device, options, tensor_parallel, _acceptance(acceptance))
    pools = _pools(disaggregate, kv_link, device, replicas, tensor_parallel)
    if pools:
        engine = replace(engine, kv=subject.shape.kv)  # side state moves with the blocks
    if steps is not None:
        times: StepPredictor = stated_times(steps)
    elif profile is not None:
        times = LayerProfile.read(profile, subject.shape.num_layers)
    elif is_measured:
        times, engine = _measured(Path(what), subject, options, engine)
    else:
        assert device
        times = subject.steps(device, tensor_parallel)
    deployment = Deployment(
        shape=_with_blocks(engine, subject),
        times=times,
        options=options,
        timeout_seconds=timeout,
        replicas=replicas,
        router=router,
        autoscaling=Autoscaling(
            rule=scaling_rule,  # type: ignore[arg-type]  # click's choices are the rules
            most=autoscale,
            open_per_replica=open_per_replica,
            startup_seconds=startup_seconds,
        )
        if autoscale is not None
        else None,
        failures=failures_of(fail),
        drains=drains_of(drain),
        disaggregation=pools,
        regions=_regions(region, replicas),
        seed=seed,
    )

    def requests_of(sizes: RequestSizes, count: int | None) -> Traffic:
        context = subject.shape.context_tokens
        return parse_traffic(
            load, sizes=sizes, count=count, context_tokens=context, seed=seed, speed=speed, scale=scale
        )

    lengths = RequestSizes(**sizes)
    traffic = requests_of(lengths, requests)
    source = getattr(times, "source", "the profile " + shown_path(profile) if profile else "")
    if opens:
        row = None if steps or profile or is_measured or pools else device
        is_trace = Path(load).exists()
        _open_cockpit(subject, deployment, traffic, requests_of, lengths, level, source, row, tensor_parallel, is_trace)
        return
    recording = Recording()
    watched = replace(deployment, watch=recording.watch) if page else deployment
    found = watched.run(traffic, level, recording.end if page else None)
    together = deployment.together().run(traffic, level) if pools else None
    limit = capacity(deployment, traffic, level) if find_capacity else None
    around = sweep(deployment, traffic, level, sweep_rates(limit.low)) if limit else []
    if page:
        write_page(page, simulation_page(subject.name, traffic.name, level, found, around, source, recording, together))
    if as_json:
        print_json(_as_json(subject, source, deployment, found, together, limit, around))
        return
    print_note(f"step times: {source}")
    _print(traffic, level, found)
    if pools and together:
        _print_pools(pools, found, together)
    if limit:
        _print_capacity(limit, around)


def _open_cockpit(
    subject: PlannedModel,
    deployment: Deployment,
    traffic: Traffic,
    requests_of: Callable[[RequestSizes, int | None], Traffic],
    sizes: RequestSizes,
    level: LevelBounds,
    source: str,
    device: Hardware | None,
    devices: int,
    is_trace: bool,
) -> None:
    """Serve the cockpit until Ctrl-C; print its address, and open it where there is a desktop.

    device   whose data sheet predicts steps of other models; None where their times are given
    """
    from ingot.builder.pages.cockpit import Simulated, serve_cockpit  # needs the extra serve; the other pages do not

    def remade(
        subject: PlannedModel, options: EngineOptions, devices: int, acceptance: tuple[float, ...]
    ) -> Deployment:
        assert device
        engine = _engine(subject, device, options, devices, acceptance)
        times = subject.steps(device, devices)
        return replace(deployment, shape=engine, times=times, options=options)

    def show(address: str) -> None:
        print_line(f"the cockpit is at {address} until Ctrl-C")
        if sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
            webbrowser.open(address)

    simulated = Simulated(
        subject=subject,
        deployment=deployment,
        level=level,
        source=source,
        sizes=sizes,
        is_trace=is_trace,
        rate=traffic.rate,
        devices=devices,
        traffic=requests_of,
        remake=remade if device else None,
    )
    serve_cockpit(simulated, show)


def _pools(
    text: str | None, kv_link: float | None, device: Hardware | None, replicas: int, devices: int
) -> ReplicaPools | None:
    """Return the pools; their blocks move over the devices' link inside a node, else over the network."""
    if text is None:
        if kv_link is not None:
            raise UsageError("--kv-link is the link of --disaggregate: give both")
        return None
    if replicas != 1:
        raise UsageError("--disaggregate PREFILL:DECODE gives the numbers of replicas: leave out --replicas")
    pools = ReplicaPools.parse(text, PCIE)
    if kv_link is not None:
        return replace(pools, link=CopyLink(kv_link * 1e9))
    if device is None:
        raise UsageError("nothing says how fast KV blocks move; give --on HARDWARE or --kv-link GIGABYTES")
    is_one_node = pools.replicas * devices <= device.devices
    return replace(pools, link=CopyLink(device.link if is_one_node else device.network))


def _regions(texts: tuple[str, ...], replicas: int) -> tuple[UserRegion, ...]:
    if texts and replicas != 1:
        raise UsageError("--region NAME:REPLICAS:LATENCY gives the numbers of replicas: leave out --replicas")
    return regions_of(texts)


def _refuse_contradictions(device: Hardware | None, steps: str | None, profile: Path | None, is_measured: bool) -> None:
    """Raise UsageError unless step times have one source."""
    given = [steps is not None, profile is not None, is_measured]
    if sum(given) > 1 or not (any(given) or device):
        raise UsageError(
            "the times of steps come from --on HARDWARE, from --steps COUNT=SECONDS,..., from --profile FOLDER or from"
            " --measure; give one of them (with --steps or --profile, --on says how much memory there is for KV blocks)"
        )
    if is_measured and device:
        raise UsageError("--measure measures steps on this machine: leave out --on")


def stated_times(text: str) -> StepModel:
    """Return the step model of a text such as steps=0.003,rows=0.0002: seconds in proportion to counts of a step."""
    counts: dict[str, Count] = {count: count for count in get_args(Count)}
    terms = []
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in counts:
            raise UsageError(f"--steps: {unknown('count', name, counts, 'counts of a step')}")
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < 1e6:
            raise UsageError(f"--steps: {name} is {value!r}; it must be seconds from 0 on")
        terms.append(Term(name, (Use("overhead", counts[name], seconds),)))
    model = StepModel(tuple(terms), f"stated: {text}", 0.0)
    if not any(use.seconds for term in model.parts for use in term.uses if use.count in ("steps", "rows")):
        raise UsageError(f"--steps {text}: a step would take no time; give seconds of steps or of rows above 0")
    return model


def _engine(
    subject: PlannedModel, device: Hardware | None, options: EngineOptions, devices: int, acceptance: tuple[float, ...]
) -> EngineShape:
    """Return the engine that would be loaded; with 0 blocks where the memory is unknown."""
    kv, program = subject.shape.kv, subject.program
    blocks = options.kv_blocks or (options.kv_bytes // kv.block_bytes if isinstance(options.kv_bytes, int) else 0)
    if device is not None and not blocks:
        total = int(device.memory) * devices
        memory = plan_memory(program, subject.model, subject.shape, total, device.words, options)
        if not memory.num_blocks:
            raise UsageError(f"{subject.name} does not fit: {memory.reason}; give --tensor-parallel or other hardware")
        blocks = memory.num_blocks
    batch_tokens = options.max_batch_tokens or program.max_batch_tokens
    link = CopyLink(device.host_link) if device else PCIE
    return EngineShape(
        kv=kv.model_copy(update={"state_bytes": 0, "state": ()}) if kv.state_bytes else kv,
        num_blocks=blocks,
        slow_blocks=_slow_blocks(subject, blocks, options),
        slow_link=link,
        max_batch_tokens=batch_tokens,
        max_sequences=options.max_sequences or min(program.max_sequences, batch_tokens),
        context_tokens=subject.shape.context_tokens,
        host_link=link,
        acceptance=acceptance,
    )


def _slow_blocks(subject: PlannedModel, num_fast: int, options: EngineOptions) -> int:
    """Blocks of the slow part of a size that is given; none by "auto", which looks at the free space of a machine."""
    if options.kv_offload in ("auto", "off") or not num_fast:
        return 0
    given: dict[str, Any] = {"kv_offload": options.kv_offload, "kv_offload_to": "memory"}
    return resolve_slow_part(
        subject.model, subject.shape.kv, num_fast, folder=Path(), free_bytes=lambda: 0, **given
    ).num_blocks


def _with_blocks(engine: EngineShape, subject: PlannedModel) -> EngineShape:
    if not engine.num_blocks:
        raise UsageError(f"nothing says how many KV blocks {subject.name} has; give --on HARDWARE or --set kv_blocks=N")
    return engine


def _measured(
    artifact: Path, subject: PlannedModel, options: EngineOptions, engine: EngineShape
) -> tuple[StepModel, EngineShape]:
    """Measure an artifact's steps on this machine; return them, and the engine as it was loaded."""
    if kind_of(str(artifact)) != "artifact":
        raise UsageError(f"--measure runs an artifact, and {shown_path(artifact)} is not one: build it first")
    executor = load_executor(open_artifact(artifact), options)
    try:
        fast = num_fast_blocks(executor)
        slow = executor.num_blocks - fast
        speed = executor.slow_bytes_per_second if isinstance(executor, OffloadingExecutor) else inf
        loaded = replace(engine, num_blocks=fast, slow_blocks=slow, slow_link=CopyLink(speed, 0.0))
        return measure(executor, subject.shape.experts), loaded
    finally:
        executor.close()


def _acceptance(text: str | None) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        chances = tuple(float(each) for each in text.split(","))
    except ValueError:
        chances = (-1.0,)
    if not all(0 <= each <= 1 for each in chances) or len(chances) > 64:
        raise UsageError(f"--acceptance is {text}; it must be a chance from 0 to 1 for each draft, as 0.8,0.7,0.6")
    return chances


def _as_json(
    subject: PlannedModel,
    source: str,
    deployment: Deployment,
    found: Figures,
    together: Figures | None,
    limit: Capacity | None,
    around: list[Figures],
) -> dict[str, Any]:
    shape = deployment.shape
    return {
        "model": subject.name,
        "step_times": source,
        "relative_error": getattr(deployment.times, "relative_error", None),
        "kv_blocks": shape.num_blocks,
        "kv_slow_blocks": shape.slow_blocks,
        "max_sequences": shape.max_sequences,
        "max_batch_tokens": shape.max_batch_tokens,
        "replicas": deployment.replicas,
        "router": deployment.router,
        "regions": [asdict(each) for each in deployment.regions],
        "disaggregation": asdict(deployment.disaggregation) if deployment.disaggregation else None,
        "figures": asdict(found),
        "figures_together": asdict(together) if together else None,
        "capacity": {
            "requests_per_second": limit.low,
            "bracket": [limit.low, limit.high],
            "interval": [limit.least, limit.most],
            "knee": knee(around).offered_rate,
            "runs": [asdict(each) for each in around],
        }
        if limit
        else None,
    }


def _print(traffic: Traffic, level: LevelBounds, found: Figures) -> None:
    rows = [
        (name, *(f"{getattr(times, each) * 1e3:,.1f}" for each in ("mean", "p50", "p90", "p99")))
        for name, times in (("queue", found.queue), ("TTFT", found.ttft), ("TPOT", found.tpot), ("E2E", found.e2e))
        if isinstance(times, Quantiles)
    ]
    print_table(f"{traffic.name}: milliseconds", ("", "mean", "p50", "p90", "p99"), rows)
    facts = [
        ("requests", f"{found.num_requests:,} at {found.offered_rate:.4g}/s in {found.seconds:,.1f} s"),
        ("ended otherwise", f"{found.num_refused:,} refused, {found.num_timeouts:,} timed out"),
        ("output", f"{found.output_tokens_per_second:,.0f} tokens/s, {found.mean_batch:.1f} tokens a step"),
        ("goodput", f"{found.goodput:.4g}/s, {found.good_share:.1%} of requests ({level.words})"),
        ("engines", f"busy {found.busy_share:.0%}, {found.num_preemptions:,} preemptions, {found.num_steps:,} steps"),
        ("prefix cache", f"{found.cached_share:.1%} of prompt tokens"),
        ("queue", "grows without bound: requests arrive faster than they end" if found.is_saturated else "bounded"),
    ]
    if found.abroad_share:
        facts.append(("regions", f"{found.abroad_share:.1%} of requests served by another than their user's"))
    print_table("", ("", ""), facts, left=2)


def _print_pools(pools: ReplicaPools, found: Figures, together: Figures) -> None:
    rows = [
        (
            name,
            f"{each.goodput:.4g}",
            f"{each.good_share:.1%}",
            f"{each.ttft.p50 * 1e3:,.0f} / {each.ttft.p99 * 1e3:,.0f}",
            f"{each.tpot.p50 * 1e3:,.1f} / {each.tpot.p99 * 1e3:,.1f}",
            f"{each.output_tokens_per_second:,.0f}",
        )
        for name, each in ((f"{pools.prefill} for prompts, {pools.decode} decode", found), ("all together", together))
    ]
    transfer = found.kv_transfer
    assert transfer
    pays = "pays" if found.goodput > together.goodput else "does not pay"
    title = (
        f"disaggregation {pays}: {transfer.mean_bytes / 1e6:,.1f} MB of a prompt's KV blocks take"
        f" {transfer.mean_seconds * 1e3:,.1f} ms, with the wait for the link of"
        f" {pools.link.bytes_per_second / 1e9:.4g} GB/s"
    )
    header = (f"{pools.replicas} replicas", "goodput/s", "good", "TTFT p50/p99 ms", "TPOT p50/p99 ms", "tokens/s")
    print_table(title, header, rows)


def _print_capacity(limit: Capacity, around: list[Figures]) -> None:
    rows = [
        (
            f"{each.offered_rate:.4g}",
            f"{each.goodput:.4g}",
            f"{each.good_share:.1%}",
            f"{each.ttft.p50 * 1e3:,.0f} / {each.ttft.p99 * 1e3:,.0f}",
            f"{each.tpot.p50 * 1e3:,.1f} / {each.tpot.p99 * 1e3:,.1f}",
            "no bound" if each.is_saturated else "bounded",
        )
        for each in around
    ]
    title = (
        f"capacity {limit.low:.4g} requests/s (from {limit.least:.4g} to {limit.most:.4g}), knee at"
        f" {knee(around).offered_rate:.4g}"
    )
    header = ("offered/s", "goodput/s", "good", "TTFT p50/p99 ms", "TPOT p50/p99 ms", "queue")
    print_table(title, header, rows, left=0)
