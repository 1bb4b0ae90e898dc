"""A step model from a data sheet: bytes over bandwidth and operations over flops, each with the share that is reached.

Within linear layers, and within attention, reads and arithmetic overlap and the slower binds. What no data sheet has,
the seconds of a layer, a row and an all-reduce, are of `Overheads`; `python -m benchmarks.planning.step_model` fits
them, and the shares that are reached, to rows that were measured on H100s. Their error is that of the same command on
engines that the fit has not seen. Nothing was measured with experts over devices, or with pipeline stages: their terms
are the arithmetic of the bytes that move and of the slots that idle.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ingot.errors import UsageError
from ingot.planning.hardware import Hardware, find_hardware
from ingot.planning.model_shape import Matmuls, ModelShape, PlacedShape
from ingot.planning.parallelism import Parallelism, bubble_share, stage_transfer_seconds
from ingot.planning.step_model import StepModel, Term, Use

RELATIVE_ERRORS = {"gpu": 0.35, "tpu": 1.0, "cpu": 1.0}
"""Of a prediction from a data sheet, by kind of hardware. On H100s, 95 % of the rows of engines outside of the fit are
within it; nothing was measured on TPUs and CPUs, where a factor of two is allowed for."""


@dataclass(frozen=True)
class Overheads:
    """Shares of the data sheet that programs reach, and seconds that depend on no bandwidth.

    attention_flops      share that attention of prompts reaches
    expert_layer_seconds further seconds of a layer with experts
    row_seconds          of a sequence: scheduling and sampling
    """

    bandwidth: float = 1.0
    flops: float = 1.0
    attention_flops: float = 1.0
    link: float = 1.0
    layer_seconds: float = 0.0
    expert_layer_seconds: float = 0.0
    row_seconds: float = 0.0


IDEAL = Overheads()
_FITTED = Overheads(0.75, 0.75, 0.11, 0.57, 63e-6, 29e-6, 41e-6)
MEASURED = {"gpu": _FITTED, "tpu": _FITTED, "cpu": Overheads(0.75, 0.5, 0.3, 0.5, 10e-6, 10e-6, 5e-6)}
"""By kind of hardware; those of CPUs are assumptions, which a measured artifact replaces."""

_CHANGE_SECONDS: Mapping[str, float] = {"cpu": 2e-6, "gpu": 20e-6, "tpu": 20e-6}
"""Of a step's change to another device, besides the bytes that are copied: of CPUs measured (docs/log.md), of others an
assumption."""


@dataclass(frozen=True)
class DeviceChange:
    """The cost of a step's change to another device: seconds, and bytes a second that copies of its values reach."""

    seconds: float
    bandwidth: float

    @classmethod
    def between(cls, devices: Sequence[Hardware]) -> "DeviceChange":
        """The cost of the slowest of the devices."""
        return cls(
            max(_CHANGE_SECONDS[one.kind] for one in devices),
            min(_copy_bandwidth(one) * MEASURED[one.kind].link for one in devices),
        )


def data_sheet(
    shape: ModelShape,
    hardware: Hardware,
    overheads: Overheads | None = None,
    tensor_parallel: int = 1,
    *,
    layout: Parallelism | None = None,
    microbatches: int = 1,
) -> StepModel:
    """The step model of a model on one replica's devices.

    tensor_parallel  devices of a node that share every layer
    layout           any other way to share the model, in place of tensor_parallel
    microbatches     parts of a step that pass the pipeline's stages one after the other
    """
    reached = MEASURED[hardware.kind] if overheads is None else overheads
    layout = layout or Parallelism(tensor_parallel, 1, 0.0)
    terms: Iterable[Term] = roofline_terms(shape, hardware, reached, layout.tensor, layout.expert)
    if layout.pipeline > 1:
        terms = _pipelined(terms, shape, hardware, reached, layout.pipeline, microbatches)
    source = (
        f"data sheet of {hardware.words} ({'; '.join(hardware.sources)}), with {reached.bandwidth:.0%} of its bandwidth"
        f" and {reached.flops:.0%} of its flops"
    )
    return StepModel(tuple(terms), source, RELATIVE_ERRORS[hardware.kind] if reached is not IDEAL else 0.0)


def placed_on(parts: Sequence[PlacedShape], hardware: Hardware) -> list[Hardware]:
    """Return the row of each device; of the first, that of the plan. UsageError for one that names none."""
    found = [hardware]
    for number, part in enumerate(parts[1:], start=1):
        if part.hardware is None:
            raise UsageError(
                f"the recipe places a part of the model on {part.device}, whose speed is unknown: add hardware: NAME to"
                f" devices.{number}, as in {{cpu: 64GiB, hardware: epyc-9654}}"
            )
        found.append(find_hardware(part.hardware))
    return found


def placed_steps(parts: Sequence[PlacedShape], hardware: Hardware) -> StepModel:
    """The step model of a model whose parts are placed on devices, each with its own data sheet; see `placed_on`."""
    rows = placed_on(parts, hardware)
    terms, sources, change = list[Term](), list[str](), DeviceChange.between(rows)
    for part, row in zip(parts, rows, strict=True):
        sheet = data_sheet(part.shape, row)
        # Sequences are scheduled and sampled once, and KV is copied from and to the host once.
        has_head = any(matmul.role == "head" for matmul in part.shape.matmuls)
        once = {*(() if has_head else ("sequences",)), *(("host copies",) if part is not parts[0] else ())}
        terms += (Term(f"{part.device}: {term.name}", term.uses) for term in sheet.parts if term.name not in once)
        terms.append(Term(f"entries of {part.device}", (Use("overhead", "steps", part.entries * change.seconds),)))
        terms.append(Term(f"copies to {part.device}", (Use("link", "rows", part.entry_bytes / change.bandwidth),)))
        sources.append(f"{part.device}: {sheet.source}")
    return StepModel(tuple(terms), "; ".join(sources), max(RELATIVE_ERRORS[row.kind] for row in rows))


def _copy_bandwidth(hardware: Hardware) -> float:
    """Bytes a second to the host, or of a copy in its memory."""
    return hardware.bandwidth / 2 if hardware.kind == "cpu" else hardware.host_link


def roofline_terms(
    shape: ModelShape, hardware: Hardware, reached: Overheads, tensor_parallel: int = 1, expert_parallel: int = 1
) -> Iterator[Term]:
    """Yield the terms of a step on devices that share every layer, or on devices that share the experts alone.

    With the experts over devices, each device has all other weights, and decodes sequences of its own.
    """
    alone = hardware.bandwidth * reached.bandwidth
    devices = tensor_parallel * expert_parallel
    dense = [matmul for matmul in shape.matmuls if matmul.role in ("linear", "router")]
    expert = [matmul for matmul in shape.matmuls if matmul.role == "expert"]
    head = [matmul for matmul in shape.matmuls if matmul.role == "head"]

    def flops(matmuls: list[Matmuls]) -> float:
        return sum(one.flops_per_token / hardware.peak(one.inputs)[1] for one in matmuls) / (reached.flops * devices)

    def read(matmuls: list[Matmuls], shared_by: int) -> float:
        return sum(one.bytes for one in matmuls) / (alone * shared_by)

    if dense:
        linear = (Use("memory", "steps", read(dense, tensor_parallel)), Use("compute", "rows", flops(dense)))
        yield Term("linear layers", linear)
    if expert:
        reads = Use("memory", "rows", read(expert, devices), shape.expert_reach)
        yield Term("experts", (reads, Use("compute", "rows", flops(expert))))
    if head:
        uses = (Use("memory", "steps", read(head, tensor_parallel)), Use("compute", "num_sequences", flops(head)))
        yield Term("head", uses)
    if shape.kv.layers or shape.kv.state_bytes:
        yield from _attention(shape, hardware, reached, tensor_parallel, expert_parallel)
    layers = shape.num_layers
    seconds = layers * (reached.layer_seconds + (reached.expert_layer_seconds if expert else 0.0))
    yield Term("layers", (Use("overhead", "steps", seconds),))
    yield Term("sequences", (Use("overhead", "num_sequences", reached.row_seconds / expert_parallel),))
    if tensor_parallel > 1:
        yield from _all_reduces(shape, hardware, reached, tensor_parallel)
    if expert_parallel > 1:
        yield _all_to_alls(shape, hardware, reached, expert_parallel)


def _attention(shape: ModelShape, hardware: Hardware, reached: Overheads, tensor: int, replicas: int) -> Iterator[Term]:
    """Attention of devices that share the heads, or of replicas that have sequences of their own."""
    kv_heads, devices = max((layer.num_kv_heads for layer in shape.kv.layers), default=1), tensor * replicas
    token = shape.kv_token_bytes / (hardware.bandwidth * reached.bandwidth * min(tensor, kv_heads) * replicas)
    pair = shape.attention_flops / (hardware.peak("fp16")[1] * devices)
    yield Term(
        "decode attention",
        (Use("memory", "context_tokens", token), Use("compute", "context_tokens", pair / reached.flops)),
    )
    yield Term("prefill attention", (Use("compute", "prefill_context_tokens", pair / reached.attention_flops),))
    if shape.kv.state_bytes:
        both_ways = 2 * shape.kv.state_bytes / (hardware.bandwidth * reached.bandwidth * devices)
        yield Term("side state", (Use("memory", "num_sequences", both_ways),))
    yield Term(
        "host copies",
        (Use("host", "copied_bytes", 1 / hardware.host_link), Use("host", "restored_bytes", 1 / hardware.host_link)),
    )


def _all_reduces(shape: ModelShape, hardware: Hardware, reached: Overheads, devices: int) -> Iterator[Term]:
    """Two sums over all devices in each layer, of which each device moves 2 (n - 1) / n of the hidden state's bytes."""
    row = 2 * shape.num_layers * 2 * (devices - 1) / devices * 2 * shape.hidden_size
    yield Term("all-reduces", (Use("link", "rows", row / (hardware.link * reached.link)),))


def _all_to_alls(shape: ModelShape, hardware: Hardware, reached: Overheads, devices: int) -> Term:
    """In each layer of experts, the hidden states of tokens go to their experts' devices, and the results back.

    Tokens choose experts evenly: of n devices, (n - 1) / n of the choices are on others; beyond the node, the network
    carries them.
    """
    _, chosen = shape.experts
    row = 2 * shape.num_expert_layers * chosen * 2 * shape.hidden_size / devices
    near, far = (min(devices, hardware.devices) - 1) / devices, max(0, devices - hardware.devices) / devices
    seconds = row * (near / hardware.link + far / hardware.network) / reached.link
    return Term("all-to-alls", (Use("link", "rows", seconds),))


def _pipelined(
    terms: Iterable[Term], shape: ModelShape, hardware: Hardware, reached: Overheads, stages: int, microbatches: int
) -> Iterator[Term]:
    """Yield the terms of a step whose M microbatches pass S stages in M + S - 1 slots, and what is idle in them.

    A stage has 1 / S of the layers, and a microbatch 1 / M of the rows, so M slots do M / S of a microbatch's whole
    step. The other S - 1 slots are the bubble. What is counted once a step, such as reading weights, is paid by each
    microbatch.
    """
    idle = bubble_share(stages, microbatches)
    for term in terms:
        slots = tuple(_of_microbatch(use, microbatches, (microbatches + stages - 1) / stages) for use in term.uses)
        yield Term(term.name, tuple(_times(use, 1 - idle) for use in slots))
        yield Term(f"pipeline bubble of {term.name}", tuple(_times(use, idle) for use in slots))
    handed_over = (microbatches + stages - 2) / microbatches
    seconds = stage_transfer_seconds(shape, hardware, 1) / reached.link * handed_over
    yield Term("transfers between stages", (Use("link", "rows", seconds),))


def _of_microbatch(use: Use, microbatches: int, slots: float) -> Use:
    """The use with the counts of one microbatch, as many times."""
    if use.count == "steps":
        return _times(use, slots)
    if use.reach:
        reach = tuple((count * microbatches, share) for count, share in use.reach)
        return Use(use.resource, use.count, use.seconds * slots, reach)
    return _times(use, slots / microbatches)


def _times(use: Use, factor: float) -> Use:
    return Use(use.resource, use.count, use.seconds * factor, use.reach)
