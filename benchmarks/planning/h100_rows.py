"""Rows of serving benchmarks on H100s, grouped by engine, model, precision and parallelism, and the models' shapes.

The file is shared test data, h100-serving.csv. Of equal runs one is kept; runs of disaggregated fleets are left out.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2
from pathlib import Path

from ingot.artifact import KVGeometry
from ingot.planning.fitting import MeasuredStep
from ingot.planning.hardware import FlopType, Hardware, find_hardware
from ingot.planning.memory import fitting_sequences
from ingot.planning.model_shape import Matmuls, ModelShape
from ingot.planning.serving_rows import ServingRow, read_rows

Key = tuple[str, ...]
KEY = ("backend", "backend_version", "model_path", "precision", "tp_size", "moe_tp_size", "moe_ep_size")
LEAST_ROWS = 10
BURST = ("sglang",)
"""Engines whose runs began all requests at once: TTFT grows with concurrency x prompt, as no steady load's does."""
_MEMORY_SHARE = 0.9
"""Of a device's memory, by default in all three engines, for weights and KV."""
_WEIGHT_BYTES = {"": 2.0, "fp8": 1.0, "fp4": 0.53125}
_WINDOW = 128


@dataclass(frozen=True)
class Decoder:
    """Sizes from a model's config.json; windowed: every other layer attends to the last 128 tokens."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0
    chosen: int = 0
    windowed: bool = False


MODELS = {
    "Qwen/Qwen3-32B": Decoder(64, 5120, 25600, 64, 8, 128, 151936),
    "Qwen/Qwen3-235B-A22B-FP8": Decoder(94, 4096, 1536, 64, 4, 128, 151936, 128, 8),
    "meta-llama/Llama-3.1-8B-Instruct": Decoder(32, 4096, 14336, 32, 8, 128, 128256),
    "meta-llama/Llama-3.1-70B": Decoder(80, 8192, 28672, 64, 8, 128, 128256),
    "openai/gpt-oss-120b": Decoder(36, 2880, 2880, 64, 8, 64, 201088, 128, 4, windowed=True),
    "MiniMaxAI/MiniMax-M2.5": Decoder(62, 3072, 1536, 48, 8, 128, 200064, 256, 8),
}


@dataclass(frozen=True)
class Group:
    """The rows of one engine with one model at one precision on so many devices."""

    key: Key
    rows: tuple[ServingRow, ...]

    @property
    def engine(self) -> str:
        """The engine's name, whatever its version."""
        return self.key[0]

    @property
    def devices(self) -> int:
        """Devices that share every layer."""
        return int(self.key[4])

    @property
    def shape(self) -> ModelShape:
        """The model as this engine stores it."""
        return _shape(MODELS[self.key[2]], self.key[3], kv_is_fp8=self.engine == "trtllm" and self.key[3] == "fp8")

    def measured(self, hardware: Hardware) -> list[MeasuredStep]:
        """Each row's average step, of no more sequences than the devices' memory holds."""
        shape = self.shape
        found = []
        for row in self.rows:
            most = fitting_sequences(shape, hardware.memory * _MEMORY_SHARE, row.load.total_tokens, self.devices)
            one = row.measured(min(most, row.load.concurrency))
            share = shape.read_tokens(row.load.mean_context) / row.load.mean_context
            step = one.step._replace(context_tokens=one.step.context_tokens * share)
            found.append(replace(one, step=step))
        return found


def read_groups(file: Path) -> list[Group]:
    """Read the groups that have at least LEAST_ROWS different runs."""
    groups: dict[Key, dict[object, ServingRow]] = defaultdict(dict)
    for row in read_rows(file):
        columns = row.columns
        if columns["mode"] == "agg" and columns["model_path"] in MODELS and columns["tp_size"]:
            key = tuple(columns[name] for name in KEY)
            kept = replace(row, load=replace(row.load, arrival="burst" if key[0] in BURST else "steady"))
            groups[key].setdefault((row.load, round(row.tpot_seconds, 9)), kept)
    return [Group(key, tuple(rows.values())) for key, rows in sorted(groups.items()) if len(rows) >= LEAST_ROWS]


def h100() -> Hardware:
    """The device of all rows."""
    return find_hardware("h100")


def _shape(model: Decoder, precision: str, kv_is_fp8: bool) -> ModelShape:
    size = _WEIGHT_BYTES[precision]
    outside = 2.0 if precision == "fp4" else size
    inputs: FlopType = "fp8" if precision == "fp8" else "fp16"
    width = model.heads * model.head_dim

    def matmul(rows: int, columns: int, count: int, bytes_: float) -> Matmuls:
        return Matmuls("linear", rows, columns, count, int(rows * columns * count * bytes_), inputs=inputs)

    inner = matmul(model.inner, model.hidden, 3 * model.layers * max(1, model.experts), size)
    if model.experts:
        inner = replace(inner, role="expert", experts=model.experts, chosen=model.chosen)
    head = Matmuls("head", model.vocab, model.hidden, 1, model.vocab * model.hidden * 2)
    attention = (
        matmul(width + 2 * model.kv_heads * model.head_dim, model.hidden, model.layers, outside),
        matmul(model.hidden, width, model.layers, outside),
    )
    windows = tuple(_WINDOW * (layer % 2 == 0) for layer in range(model.layers)) if model.windowed else 0
    return ModelShape(
        name="",
        num_parameters=0,
        num_layers=model.layers,
        hidden_size=model.hidden,
        vocab_size=model.vocab,
        context_tokens=131072,
        matmuls=(*attention, inner, head),
        embedding_bytes=head.bytes,
        query_heads=(model.heads,) * model.layers,
        kv=KVGeometry(
            num_layers=model.layers,
            num_kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            window=windows,
            dtype="fp8" if kv_is_fp8 else "float16",
        ),
    )


def calibration_rows(rows: Sequence[ServingRow], count: int) -> list[int]:
    """Indices of rows spread over concurrency and lengths: the smallest, then whichever is farthest from those chosen.

    Times are not looked at.
    """
    points = [(log2(r.load.concurrency), log2(r.load.prompt_tokens), log2(r.load.output_tokens)) for r in rows]
    means = [sum(axis) / len(axis) for axis in zip(*points, strict=True)]
    spreads = [
        (sum((value - mean) ** 2 for value in axis) / len(axis)) ** 0.5 + 1e-9
        for axis, mean in zip(zip(*points, strict=True), means, strict=True)
    ]
    scaled = [tuple((v - m) / s for v, m, s in zip(point, means, spreads, strict=True)) for point in points]
    chosen = [min(range(len(scaled)), key=lambda index: sum(scaled[index]))]
    while len(chosen) < min(count, len(scaled)):
        chosen.append(max(range(len(scaled)), key=lambda index: _distance(scaled, chosen, index)))
    return chosen


def _distance(points: Sequence[tuple[float, ...]], chosen: Sequence[int], index: int) -> float:
    if index in chosen:
        return -1.0
    return min(sum((a - b) ** 2 for a, b in zip(points[one], points[index], strict=True)) for one in chosen)
