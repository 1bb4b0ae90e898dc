"""Units of models for tests of `place: auto`: small random ones, and mixtures by their published sizes; other rules.

`python -m tests.pipeline.targets.cpu.placed_shapes` prints the predicted times by each rule. `fit_devices` is the rule
of llama.cpp's --fit for one GPU (common/fit.cpp, steps 3 and 4), by memory alone: with all experts on the host, layers
go to the GPU from the last one on while they fit; then experts from the first of them on.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ingot.artifact.programs.expert_choices import even_reach
from ingot.passes.numerics.chain_placement import place_chain, seconds_of
from ingot.pipeline.targets.cpu.place_auto import PlaceDevice, PlaceUnit, chain_of
from ingot.planning.hardware import find_hardware

GPU, HOST = 0, 1
_BITS = 4.5
"""Bits of a weight: codes of 4, and a scale of 16 for 32 weights."""


@dataclass(frozen=True)
class Mixture:
    """Sizes of a published mixture of experts. Of every `windowed`-th layer attention has a window of 128 tokens."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    chosen: int
    inner: int
    vocab: int
    windowed: int = 0


MIXTURES = {
    "Qwen3-30B-A3B": Mixture(48, 2048, 32, 4, 128, 128, 8, 768, 151936),
    "Mixtral-8x7B": Mixture(32, 4096, 32, 8, 128, 8, 2, 14336, 32000),
    "gpt-oss-120b": Mixture(36, 2880, 64, 8, 64, 128, 4, 2880, 201088, windowed=2),
}


def units_of_mixture(shape: Mixture, context: int) -> list[PlaceUnit]:
    """Embedding, attention and experts of each layer, and head."""
    entry = 4 * (2 * shape.hidden + shape.experts)
    width, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = shape.hidden * (2 * width + 2 * kv)
    expert = 3 * shape.hidden * shape.inner
    units = [PlaceUnit("embed_tokens", 1, _bytes(shape.vocab * shape.hidden), 0.0)]
    for layer in range(shape.layers):
        window = 128 if shape.windowed and layer % shape.windowed == 0 else 0
        units.append(
            PlaceUnit(
                name=f"layers.{layer}.self_attn",
                operations=3,
                size=_bytes(attention) + 4 * kv * context,
                read_bytes=_bytes(attention),
                token_kv=((4.0 * kv, window),),
                flops={"fp16": 2.0 * attention},
                entry_bytes=entry,
                layers=1,
            )
        )
        units.append(
            PlaceUnit(
                name=f"layers.{layer}.mlp.experts",
                operations=1,
                size=_bytes(shape.experts * expert),
                read_bytes=0.0,
                flops={"fp16": 2.0 * shape.chosen * expert},
                entry_bytes=entry,
                expert_layers=1,
                experts=((float(_bytes(shape.experts * expert)), even_reach(shape.experts, shape.chosen)),),
            )
        )
    head = shape.vocab * shape.hidden
    return [*units, PlaceUnit("lm_head", 1, _bytes(head), _bytes(head), flops={"fp16": 2.0 * head}, entry_bytes=entry)]


def random_units(seed: int) -> list[PlaceUnit]:
    """A small model: 2 to 4 layers of attention with KV, each with a feed-forward or experts of a random share."""
    rng = np.random.default_rng(seed)
    units = [PlaceUnit("embed_tokens", 1, int(rng.integers(1, 10**8)), 1e3)]
    attention, feed_forward = (int(rng.integers(10**6, 10**9)) for _ in range(2))
    for layer in range(int(rng.integers(2, 5))):
        if seed % 2:
            attention, feed_forward = (int(rng.integers(10**6, 10**9)) for _ in range(2))
        kv = int(rng.integers(0, 10**9))
        experts = int(rng.integers(2)) * int(rng.integers(2, 64))
        share = 1 / experts if experts else 1.0
        units.append(
            PlaceUnit(
                f"layers.{layer}.self_attn",
                2,
                attention + kv,
                float(attention),
                ((kv / 8192, 0),),
                {"fp16": 4.0 * attention},
                int(rng.integers(10**3, 10**6)),
                layers=1,
            )
        )
        units.append(
            PlaceUnit(
                f"layers.{layer}.mlp",
                2,
                feed_forward,
                feed_forward * share,
                (),
                {"fp16": 4.0 * feed_forward * share},
                int(rng.integers(10**3, 10**6)),
                expert_layers=int(bool(experts)),
            )
        )
    head = int(rng.integers(1, 10**8))
    return [*units, PlaceUnit("lm_head", 1, head, float(head), entry_bytes=10**4)]


def fit_devices(units: Sequence[PlaceUnit], memory: int) -> tuple[int, ...]:
    """The devices by the rule of --fit: GPU or HOST for each unit."""
    placed, left = [HOST] * len(units), memory
    groups = [[at] for at, unit in enumerate(units) if not unit.expert_layers and not unit.layers]
    head, layers = groups[-1], [at for at, unit in enumerate(units) if unit.layers]
    for at in [*head, *reversed(layers)]:
        if units[at].size > left:
            break
        placed[at], left = GPU, left - units[at].size
    if all(placed[at] == GPU for at in layers):
        for at, unit in enumerate(units):
            if unit.expert_layers:
                if unit.size > left:
                    break
                placed[at], left = GPU, left - unit.size
    return tuple(placed)


def layers_devices(units: Sequence[PlaceUnit], memory: int) -> tuple[int, ...]:
    """The devices by whole layers, as -ngl places them: the head and the last layers while they fit."""
    placed, left = [HOST] * len(units), memory
    starts = [at for at, unit in enumerate(units) if unit.layers]
    for begin, end in reversed(list(zip(starts, [*starts[1:], len(units)], strict=True))):
        size = sum(unit.size for unit in units[begin:end])
        if size > left:
            break
        placed[begin:end], left = [GPU] * (end - begin), left - size
    return tuple(placed)


def gpu_and_host(memory: int, gpu: str = "rtx-4090", host: str = "xeon-8592") -> list[PlaceDevice]:
    """A GPU with that much memory for the model, and a host with enough for any."""
    return [PlaceDevice("gpu", memory, find_hardware(gpu)), PlaceDevice("host", 1 << 40, find_hardware(host))]


def _bytes(elements: int) -> int:
    return int(elements * _BITS / 8)


def main() -> None:
    """Print the predicted times of mixtures on GPUs of several sizes, by each rule and the fastest placement."""
    for context, (name, shape), gigabytes in itertools.product(
        (8192, 32768, 131072), MIXTURES.items(), (6, 8, 12, 16, 24)
    ):
        units, memory = units_of_mixture(shape, context), gigabytes * 10**9
        chain = chain_of(units, gpu_and_host(memory), context // 2, 0)
        best = place_chain(chain)
        assert best is not None
        rules = {"fit": fit_devices, "layers": layers_devices}
        ratios = {rule: seconds_of(chain, place(units, memory)) / best.seconds for rule, place in rules.items()}
        for rows in (16, 64):
            many = chain_of(units, gpu_and_host(memory), context // 2, 0, rows=rows)
            own = place_chain(many)
            assert own is not None
            ratios[f"at {rows} sequences, this one"] = seconds_of(many, best.devices) / own.seconds
        words = ", ".join(f"{rule} {ratio:.3f}" for rule, ratio in ratios.items())
        print(f"{context:7,} {name:14} {gigabytes:3} GB: {best.seconds * 1e3:6.2f} ms; times it: {words}")


if __name__ == "__main__":
    main()
