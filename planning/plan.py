"""The plan of a model on hardware for a load: memory, speed, what limits, service level, money; all with sources."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ingot.artifact import ModelFacts
from ingot.errors import UsageError
from ingot.planning import formulas
from ingot.planning.hardware import Hardware
from ingot.planning.latency import Latency, predict, sweep
from ingot.planning.load import Load
from ingot.planning.memory import MemoryPlan, ProgramMemory, plan_memory, sequence_bytes
from ingot.planning.model_shape import ModelShape, PlacedShape
from ingot.planning.operations import Operation, decode_operations
from ingot.planning.parallelism import Disaggregation, Parallelism, choose_parallelism, disaggregation, layouts
from ingot.planning.roofline import data_sheet, placed_on, placed_steps
from ingot.planning.service_levels import LevelBounds
from ingot.planning.step_model import StepModel, TermSeconds
from ingot.runtime.options import EngineOptions
from ingot.sizes import format_bytes


@dataclass(frozen=True)
class PlannedModel:
    """A model in a stored form, and in words where its sizes are from."""

    name: str
    model: ModelFacts
    shape: ModelShape
    program: ProgramMemory
    source: str
    placed: tuple[PlacedShape, ...] = ()

    def steps(self, hardware: Hardware, tensor_parallel: int = 1) -> StepModel:
        """Its steps by data sheets: on devices of a node that share every layer, or on those of the recipe.

        UsageError for both, and as `placed_on`.
        """
        if not self.placed:
            return data_sheet(self.shape, hardware, tensor_parallel=tensor_parallel)
        if tensor_parallel > 1:
            names = ", ".join(part.device for part in self.placed)
            raise UsageError(f"the recipe places the model on {names}: leave out the number of devices")
        return placed_steps(self.placed, hardware)


@dataclass(frozen=True)
class ServingPlan:
    """Answers for one subject on one kind of hardware. `parallelism` is None where the model fits nowhere.

    alternatives   every way to share the model among as many devices, the chosen one included; () with one way
    """

    subject: PlannedModel
    hardware_name: str
    hardware: Hardware
    load: Load
    memory: MemoryPlan
    parallelism: Parallelism | None
    step_model: StepModel
    level: tuple[str, LevelBounds] | None = None
    price_per_hour: float | None = None
    price_source: str = ""
    api_price: float | None = None
    alternatives: tuple[tuple[Parallelism, Latency], ...] = ()

    @cached_property
    def most_sequences(self) -> float:
        """Sequences of the load that a replica runs at a time: those that fit, up to a step's most."""
        if self.parallelism is None:
            return 0.0
        return min(self.parallelism.sequences, float(self.subject.program.max_sequences))

    @cached_property
    def latency(self) -> Latency | None:
        """Prediction for the load; None where no sequence fits."""
        return predict(self.step_model, self.load, self.most_sequences) if self.most_sequences >= 1 else None

    @cached_property
    def sweep(self) -> list[Latency]:
        """Predictions for other numbers of requests at a time."""
        return sweep(self.step_model, self.load, self.most_sequences) if self.most_sequences >= 1 else []

    @property
    def best(self) -> Latency | None:
        """The most requests at a time that meet the service level at the upper end of the interval."""
        if self.level is None:
            return None
        return next((one for one in reversed(self.sweep) if not self.level[1].failures(one.upper)), None)

    @property
    def operations(self) -> list[Operation]:
        """The limits of each operation of a decode step."""
        rows = min(float(self.load.concurrency), max(1.0, self.most_sequences))
        placed = self.subject.placed
        if not placed:
            return decode_operations(self.subject.shape, self.hardware, self.load, rows)
        return [
            replace(one, name=f"{part.device}: {one.name}")
            for part, hardware in zip(placed, placed_on(placed, self.hardware), strict=True)
            for one in decode_operations(part.shape, hardware, self.load, rows)
        ]

    @property
    def terms(self) -> list[TermSeconds]:
        """The terms of the average step, largest first."""
        rows = self.latency.running if self.latency else 1.0
        return sorted(self.step_model.terms(self.load.average_step(rows)), key=lambda term: -term.seconds)

    @property
    def verdict(self) -> str:
        """The outcome for the service level: which bound fails, by how much, and the nearest load that passes."""
        if self.level is None or self.latency is None:
            return ""
        name, level = self.level
        failures = level.failures(self.latency.upper)
        if not failures:
            return f"meets {name} at the upper end of the interval"
        best = self.best
        nearest = f"; {best.load.concurrency} at a time meet it" if best else "; one at a time does not meet it either"
        if level.failures(self.latency.bounded):
            return f"does not meet {name}: {level.failures(self.latency.bounded)[0]}{nearest}"
        return f"undecided for {name}: only the upper end of the interval fails: {failures[0]}{nearest}"

    @property
    def disaggregation(self) -> dict[str, Disaggregation]:
        """Compare the transfer of KV with the interference of prompts, by link: in the node, and beyond it."""
        if self.latency is None:
            return {}
        ways = {"node": self.hardware.link, "network": self.hardware.network}
        shape, load, found = self.subject.shape, self.load, self.latency
        # One of the prompts in the average step is the request's own, which its TTFT counts.
        others = (found.tpot - found.itl) * (1 - 1 / found.running)
        return {
            way: disaggregation(shape, bandwidth, load.prompt_tokens, load.output_tokens, others)
            for way, bandwidth in ways.items()
            if way == "network" or self.hardware.devices > 1
        }

    def money(self) -> dict[str, Any]:
        """Costs of the devices; empty without a price."""
        if self.price_per_hour is None or self.parallelism is None or self.latency is None:
            return {}
        hour = self.price_per_hour * self.parallelism.devices
        rate = self.latency.tokens_per_second
        thousand = formulas.cost_per_thousand(hour, rate)
        return {
            "price_per_hour": hour,
            "source": self.price_source,
            "per_1000_tokens": thousand,
            "per_request": thousand * self.load.output_tokens / 1000,
            "per_month": formulas.cost_per_month(hour),
            "per_user_month": formulas.cost_per_month(hour) / self.load.concurrency,
            **self._against_api(hour),
        }

    def _against_api(self, price_per_hour: float) -> dict[str, float]:
        """The tokens a day from which on own devices cost less than the API; empty without an API's price."""
        if self.api_price is None:
            return {}
        month = formulas.cost_per_month(price_per_hour)
        break_even = month / formulas.api_cost_per_month(1, self.api_price)
        return {"api_per_1000_tokens": self.api_price, "break_even_tokens_a_day": break_even}

    @property
    def joules_per_token(self) -> float | None:
        """Energy of a token at the power limit; None without one."""
        if not self.hardware.watts or self.latency is None or self.parallelism is None:
            return None
        return self.hardware.watts * self.parallelism.devices / self.latency.tokens_per_second

    def as_json(self) -> dict[str, Any]:
        """All figures, each group with its source."""
        shape, subject = self.subject.shape, self.subject
        tokens = self.load.total_tokens
        return {
            "subject": subject.name,
            "source": subject.source,
            "hardware": {
                "name": self.hardware_name,
                "words": self.hardware.words,
                "sources": list(self.hardware.sources),
            },
            "model": {
                "family": subject.model.family,
                "parameters": subject.model.num_parameters,
                "layers": subject.model.num_layers,
                "context_tokens": subject.model.context_tokens,
            },
            "placed_on": [part.as_json() for part in subject.program.parts],
            "load": {
                "concurrency": self.load.concurrency,
                "prompt_tokens": self.load.prompt_tokens,
                "output_tokens": self.load.output_tokens,
                "cached_tokens": self.load.cached_tokens,
                "drafted_tokens": self.load.drafted_tokens,
                "acceptance": self.load.acceptance,
            },
            "kv": {
                "type": shape.kv.type_in_words,
                "token_bytes": shape.kv_token_bytes,
                "block_bytes": shape.kv.block_bytes,
                "sequence_tokens": tokens,
                "sequence_bytes": sequence_bytes(shape, tokens),
                "state_bytes": shape.kv.state_bytes,
            },
            "memory": self.memory.as_json(),
            "sequences": self.parallelism.sequences if self.parallelism else 0,
            "running_sequences": self.most_sequences,
            "parallelism": self.parallelism.as_json() if self.parallelism else None,
            "alternatives": [{**way.as_json(), "latency": found.as_json()} for way, found in self.alternatives],
            "disaggregation": {way: found.as_json() for way, found in self.disaggregation.items()},
            "step_model": {"source": self.step_model.source, "relative_error": self.step_model.relative_error},
            "latency": self.latency.as_json() if self.latency else None,
            "sweep": [one.as_json() for one in self.sweep],
            "operations": [operation.as_json() for operation in self.operations],
            "terms": [{"name": t.name, "resource": t.resource, "seconds": t.seconds} for t in self.terms],
            "service_level": {"name": self.level[0], "verdict": self.verdict} if self.level else None,
            "joules_per_token": self.joules_per_token,
            "money": self.money(),
        }


def make_plan(
    subject: PlannedModel,
    hardware_name: str,
    hardware: Hardware,
    load: Load,
    *,
    level: tuple[str, LevelBounds] | None = None,
    devices: int | None = None,
    measured: StepModel | None = None,
    price: float | None = None,
    api_price: float | None = None,
    options: EngineOptions | None = None,
) -> ServingPlan:
    """Plan a subject on hardware.

    devices     of a replica; None: the fewest that hold the load
    measured    a step model to use in place of the data sheet's
    price       dollars for a device and hour, in place of the hardware's
    api_price   dollars for 1,000 tokens by an API, to compare with

    UsageError for a load that is longer than the model's context, and for a number of devices that makes no layout.
    """
    if load.total_tokens > subject.model.context_tokens:
        raise UsageError(
            f"prompt and output have {load.total_tokens:,} tokens, and the model's context holds"
            f" {subject.model.context_tokens:,}: give a shorter --context, --prompt or --output"
        )
    devices = devices or (1 if subject.placed else None)
    memory = plan_memory(subject.program, subject.model, subject.shape, int(hardware.memory), hardware.words, options)
    parallelism = _parallelism(subject, hardware, load, memory, devices)
    ways = _alternatives(subject, hardware, load, parallelism) if parallelism and measured is None else []
    if ways:
        parallelism = max(ways, key=lambda way: way[1].tokens_per_second)[0]
    source = "--price" if price is not None else next((s for s in hardware.sources if s.startswith("price")), "")
    return ServingPlan(
        subject=subject,
        hardware_name=hardware_name,
        hardware=hardware,
        load=load,
        memory=memory,
        parallelism=parallelism,
        step_model=measured or layout_steps(subject, hardware, load, parallelism),
        level=level,
        price_per_hour=hardware.price_per_hour if price is None else price,
        price_source=source,
        api_price=api_price,
        alternatives=tuple(ways) if len(ways) > 1 else (),
    )


def layout_steps(subject: PlannedModel, hardware: Hardware, load: Load, layout: Parallelism | None) -> StepModel:
    """The step model of a layout; a step of a pipeline has as many microbatches as stages, or as requests if fewer."""
    if subject.placed:
        return subject.steps(hardware, layout.devices if layout else 1)
    microbatches = min(layout.pipeline, load.concurrency) if layout else 1
    return data_sheet(subject.shape, hardware, layout=layout, microbatches=microbatches)


def _alternatives(
    subject: PlannedModel, hardware: Hardware, load: Load, chosen: Parallelism
) -> list[tuple[Parallelism, Latency]]:
    """Every way to share the model among as many devices; [] for one device, whose blocks the engine counts."""
    found = []
    for way in layouts(subject.shape, hardware, load.total_tokens) if chosen.devices > 1 else ():
        running = min(way.sequences, float(subject.program.max_sequences))
        if way.devices == chosen.devices and running >= 1:
            found.append((way, predict(layout_steps(subject, hardware, load, way), load, running)))
    return found


def _parallelism(
    subject: PlannedModel, hardware: Hardware, load: Load, memory: MemoryPlan, devices: int | None
) -> Parallelism | None:
    alone = memory.sequences(load.total_tokens)
    if devices == 1 or (devices is None and memory.fits and alone >= 1):
        return Parallelism(1, 1, alone) if alone else None
    found = choose_parallelism(subject.shape, hardware, load.total_tokens, 1.0, devices=devices)
    if found is None and devices is not None:
        weights = format_bytes(subject.program.weight_bytes)
        raise UsageError(
            f"{devices} devices do not hold the model ({weights} of weights) and one sequence of"
            f" {load.total_tokens:,} tokens, or are no power of two of a node's {hardware.devices} nor whole nodes"
        )
    return found
