"""`ingot choose`: the cheapest recipe, hardware, engine options and replicas that meet a service level."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from ingot.builder.plan_variants import read_variants
from ingot.cli.terminal.console import print_json, print_line, print_note
from ingot.cli.terminal.tables import print_facts, print_table
from ingot.errors import UsageError, shown_path
from ingot.pipeline.recipe.load import load_recipe
from ingot.pipeline.targets.table import TARGETS, Target
from ingot.planning.choice.alerts import write_alert_rules
from ingot.planning.choice.configuration import PricedHardware, configurations
from ingot.planning.choice.manifests import Manifests
from ingot.planning.choice.search import MOST_REQUESTS, Limits, Question, ServingAnswer, ServingChoice, choose
from ingot.planning.hardware import find_hardware, hardware_rows
from ingot.planning.simulation.figures import parse_service_level
from ingot.planning.simulation.traffic import RequestSizes, parse_traffic

_ALL = "all"
_KINDS = ("gpu", "cpu", "tpu")
_DRAFTER = "auto"
_MOST_MISSES = 5
_NO_PRICE = "no price: give --price NAME=DOLLARS"
_GROWTH = 2
"""The autoscaler goes up to so many times the replicas that the load needs."""


def choose_command(
    what: str,
    hardware_names: tuple[str, ...],
    hardware_files: tuple[Path, ...],
    prices: tuple[str, ...],
    recipes: tuple[str, ...],
    checkpoint: Path | None,
    overrides: tuple[str, ...],
    load: str,
    requests: int | None,
    speed: float,
    scale: float,
    sizes: Mapping[str, Any],
    seed: int,
    slo: str,
    drafted: int,
    acceptance: float,
    devices: int,
    replicas: int,
    budget: float | None,
    manifests: Path | None,
    as_json: bool,
) -> int:
    """Choose, print, and write the manifests; 3 where nothing meets the service level."""
    level, limits = parse_service_level(slo), Limits(replicas, budget) if budget is not None else Limits(replicas)
    if drafted and not acceptance:
        raise UsageError(
            f"--drafted {drafted} needs --acceptance, the probability that a draft is right: `ingot verify` and"
            " /metrics of a running engine have it"
        )
    hardware, unpriced = priced_hardware(hardware_names, hardware_files, _prices(prices))
    found = read_variants(what, checkpoint, recipes, overrides, [one.hardware.kind for one in hardware])
    context = min(one.subject.shape.context_tokens for one in found.variants)
    lengths = RequestSizes(**sizes)
    traffic = parse_traffic(
        load, sizes=lengths, count=requests, context_tokens=context, seed=seed, speed=speed, scale=scale
    )
    question = Question(traffic, level, limits, seed, requests or MOST_REQUESTS)
    tried = configurations(
        found.variants,
        hardware,
        most_devices=devices,
        drafted=drafted,
        acceptance=acceptance,
        shares_prefixes=question.repeated_share > 0,
    )
    choice = choose(tried, question, print_note)
    source = _source(what, checkpoint)
    is_served = choice.best is not None and not unserved(choice.best)
    files = _write(manifests, choice.best, source, limits) if manifests and choice.best and is_served else []
    if manifests and files:
        files.append(manifests / "alerts.yaml")
        write_alert_rules(files[-1], slo, level)
    left_out = {**found.left_out, **unpriced}
    if as_json:
        print_json(_as_json(choice, question, source, left_out, files))
    else:
        _print(choice, question, source, left_out)
        for file in files:
            print_line(f"wrote {shown_path(file)}")
    return 0 if choice.best else 3


def _prices(given: Sequence[str]) -> dict[str, float]:
    """Dollars for a device and hour by the name of hardware, of texts NAME=DOLLARS."""
    prices = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            price = float(value)
        except ValueError:
            price = 0.0
        if not 0 < price < 1e6:
            raise UsageError(f"--price {text}: it must be NAME=DOLLARS for a device and hour above 0, as h100=2.5")
        prices[name] = price
    return prices


def priced_hardware(
    names: Sequence[str], files: tuple[Path, ...], prices: Mapping[str, float]
) -> tuple[list[PricedHardware], dict[str, str]]:
    """The rows that are named, or all or those of a kind, with their prices; and why others are left out.

    UsageError for an unknown name, and for a row that is named and has no price.
    """
    rows, found, left_out = hardware_rows(files), {}, {}
    for name in prices:
        find_hardware(name, files)
    for name in names:
        wide = name in (_ALL, *_KINDS)
        matching = {key: row for key, row in rows.items() if name in (_ALL, row.kind)} if wide else {}
        for key, row in (matching or {name: find_hardware(name, files)}).items():
            price = prices.get(key, row.price_per_hour)
            if price is not None:
                stated = next((source for source in row.sources if source.startswith("price")), "the row")
                found[key] = PricedHardware(key, row, price, "--price" if key in prices else stated)
            elif wide:
                left_out[key] = _NO_PRICE
            else:
                raise UsageError(
                    f"{key} has no price, and a choice is by cost: give --price {key}=DOLLARS for a device and hour"
                )
    if not found:
        raise UsageError(f"no row of --on {' '.join(names)} has a price: give --price NAME=DOLLARS")
    return list(found.values()), left_out


def _source(what: str, checkpoint: Path | None) -> str:
    """The checkpoint to build, or the artifact to serve; of a config.json its folder."""
    place = checkpoint or Path(what)
    return str(place.parent if place.name == "config.json" else place)


def _name(answer: ServingAnswer, source: str) -> str:
    """A name of a folder, and of objects of Kubernetes."""
    parts = (Path(source).resolve().name, Path(answer.configuration.variant.recipe).stem)
    words = "-".join(part for part in parts if part).lower()
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")[:50].strip("-") or "model"


def unserved(answer: ServingAnswer) -> str:
    """Return why Ingot's engine cannot serve an answer; "" for one that it serves."""
    on, tensor = answer.configuration.on, answer.configuration.tensor
    if tensor > 1:
        return f"Ingot's engine runs on one device, and this replica has {tensor}: for what it serves, add --devices 1"
    if on.hardware.kind != "cpu" and not on.hardware.sm:
        return (
            f"Ingot's GPU programs are for CUDA, and the row {on.name} has no sm (compute capability): choose among"
            " others, or add sm to a row of your own"
        )
    recipe = answer.configuration.variant.recipe
    if recipe and on.hardware.sm and not _target_for(recipe, answer):
        return f"no target of `{recipe}` builds for SM {on.hardware.sm} of {on.name}: choose among other hardware"
    return ""


def _target_for(recipe: str, answer: ServingAnswer) -> str:
    """The target that builds a recipe for the answer's GPU: its own, or that of the GPU's SM; "" for none."""
    sm = answer.configuration.on.hardware.sm
    own = _own_target(recipe, answer.configuration.variant.overrides)
    if sm in (*own.sms, *own.sm_choice):
        return own.name
    other = TARGETS.get(f"cuda-sm{sm}")
    return other.name if other and own.engine == other.engine else ""


@cache
def _own_target(recipe: str, overrides: tuple[str, ...]) -> Target:
    """The target that a recipe names."""
    return TARGETS[load_recipe(recipe, overrides).target]


def commands(answer: ServingAnswer, source: str) -> list[str]:
    """The commands that build an answer and serve one of its replicas; [] for one that the engine cannot serve."""
    if unserved(answer):
        return []
    configuration = answer.configuration
    variant, artifact, found = configuration.variant, source, []
    if variant.recipe:
        artifact = f"artifacts/{_name(answer, source)}"
        sets = [word for each in variant.overrides for word in ("--set", each)]
        own = _own_target(variant.recipe, variant.overrides)
        if configuration.on.hardware.sm and (target := _target_for(variant.recipe, answer)) != own.name:
            sets += ["--set", f"target={target}"]
        found.append(shlex.join(["ingot", "build", variant.recipe, source, *sets, "-o", artifact]))
    drafts = ["--speculate", _DRAFTER] if configuration.drafted else []
    sets = [word for each in configuration.settings for word in ("--set", each)]
    return [*found, shlex.join(["ingot", "serve", artifact, *drafts, *sets])]


def _write(folder: Path, answer: ServingAnswer, source: str, limits: Limits) -> list[Path]:
    configuration = answer.configuration
    most = max(answer.replicas, min(limits.replicas, _GROWTH * answer.replicas))
    drafter = _DRAFTER if configuration.drafted else ""
    return Manifests(_name(answer, source), answer, configuration.settings, drafter, most).write(folder)


def _as_json(
    choice: ServingChoice, question: Question, source: str, left_out: Mapping[str, str], files: Sequence[Path]
) -> dict[str, Any]:
    def of(answer: ServingAnswer) -> dict[str, Any]:
        return {
            "configuration": answer.configuration.as_json(),
            "step_times": answer.configuration.times.source,
            "replicas": answer.replicas,
            "price_per_hour": answer.price,
            "requests_per_second_of_a_replica": answer.rate,
            "expected": asdict(answer.expected),
            "at_worst": asdict(answer.worst),
            "commands": commands(answer, source),
            "not_served": unserved(answer) or None,
            "needs": choice.needs(answer) if answer is not choice.best else "",
        }

    return {
        "load": {"name": question.traffic.name, "requests_per_second": question.traffic.rate},
        "service_level": question.level.model_dump(),
        "answers": [of(answer) for answer in choice.answers],
        "misses": [
            {"configuration": miss.configuration.as_json(), "reason": miss.reason, "nearest": miss.nearest}
            for miss in choice.misses
        ],
        "left_out": dict(left_out),
        "num_configurations": choice.num_tried,
        "num_pruned": choice.num_pruned,
        "num_simulated_requests": choice.num_requests,
        "manifests": [str(file) for file in files],
    }


def _print(choice: ServingChoice, question: Question, source: str, left_out: Mapping[str, str]) -> None:
    print_note(
        f"{choice.num_tried} configurations, {choice.num_tried - choice.num_pruned} not ruled out by bounds;"
        f" {choice.num_requests:,} requests simulated"
    )
    for reason in dict.fromkeys(left_out.values()):
        print_note(f"left out: {', '.join(name for name, why in left_out.items() if why == reason)}: {reason}")
    if choice.best is None:
        _print_misses(choice, question)
        return
    best = choice.best
    print_facts(_facts(best, question))
    rows = [(*_row(answer), choice.needs(answer) if answer is not best else "the answer") for answer in choice.answers]
    header = ("configuration", "to win", "replicas", "$/h", "req/s each", "TTFT p99 ms", "TPOT p99 ms", "good")
    print_table("The cheapest, and the next", header, [(row[0], row[-1], *row[1:-1]) for row in rows], left=2)
    reason = unserved(best)
    if reason:
        print_note(f"no command, and no manifest: {reason}")
        return
    for line in commands(best, source):
        print_line(line)
    if best.replicas > 1:
        print_note(
            f"{best.replicas} replicas: the last command on each device, and a router before them; --manifests writes"
            " one Deployment with its Service"
        )
    if best.configuration.variant.recipe:
        print_note("the build measures whether the recipe passes its gates; a choice predicts sizes and times alone")


def _facts(answer: ServingAnswer, question: Question) -> dict[str, str]:
    configuration, level = answer.configuration, question.level
    return {
        "answer": f"{answer.replicas} x {configuration}",
        "cost": f"${answer.price:.2f} an hour, {configuration.on.price_source}",
        "load": f"{question.traffic.name}: {question.traffic.rate:.3g} requests/s",
        "service level": f"{level.words}: "
        + ", ".join(f"{name} {seconds:g} s" for name, seconds in level.bounds.items())
        + f" for {level.percentile:.0%} of requests",
        "expected": f"{answer.expected.good_share:.1%} of requests meet it; {answer.worst.good_share:.1%} with every"
        f" step {configuration.times.relative_error:.0%} longer",
        "times from": configuration.times.source,
    }


def _row(answer: ServingAnswer) -> tuple[str, ...]:
    worst = answer.worst
    return (
        str(answer.configuration),
        str(answer.replicas),
        f"{answer.price:.2f}",
        f"{answer.rate:.3g}",
        f"{worst.ttft.p99 * 1e3:,.0f}",
        f"{worst.tpot.p99 * 1e3:,.1f}",
        f"{worst.good_share:.1%}",
    )


def _print_misses(choice: ServingChoice, question: Question) -> None:
    print_line(f"Nothing meets the service level {question.level.words} with {question.traffic.name}.")
    rows = [(str(miss.configuration), miss.reason, miss.nearest or "-") for miss in choice.misses[:_MOST_MISSES]]
    print_table("The nearest", ("configuration", "fails by", "passes with"), rows, left=3)
