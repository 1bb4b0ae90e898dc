"""Tokens a second over context of one conversation that outgrows a GPU's memory, by simulation.

    python -m benchmarks.planning.slow_part --output benchmarks/results/planning-slow-part.json

The scheduler, the KV blocks and the moves between the pool's parts are the engine's; a step takes what the data sheet
says, and the bytes that it reads from the slow part take the time of the link. PCIe is taken at 25 and 50 GB/s, the
share of 4.0 and 5.0 x16 that copies reach. Two other ways are drawn next to it, by their arithmetic alone:

    all KV on the host   every step reads all of it over the link, at any context
    paged by the driver  weights and KV are one memory, which a step reads from end to end. What does not fit is paged
                         in, in place of pages chosen at random: of n bytes in a memory of c, a share h = exp(-(1 - h)
                         n / c) is found (a page survives m n misses of a round with exp(-m n / c)). By least recent
                         use none is found as soon as one byte does not fit
"""

import json
import math
from pathlib import Path
from typing import Any

import click
from tests.planning.shapes import dense_shape

from benchmarks.device import device_facts
from ingot.artifact import KVGeometry
from ingot.planning.hardware import find_hardware
from ingot.planning.roofline import data_sheet
from ingot.planning.simulation.replica import Replica, serve
from ingot.planning.simulation.simulated_executor import EngineShape
from ingot.planning.simulation.simulated_tiers import CopyLink
from ingot.planning.simulation.timed_request import TimedRequest
from ingot.planning.simulation.traces import RequestLengths
from ingot.planning.step_model import StepModel, StepShape
from ingot.runtime.options import EngineOptions

LINKS = {"PCIe 4": 25e9, "PCIe 5": 50e9}
_OUTPUT = 32
_STEP_TOKENS = 2048


def simulated_rate(times: StepModel, kv: KVGeometry, context: int, num_fast: int, link: float) -> float:
    """Tokens a second after a prompt of so many tokens."""
    needed = -(-(context + _OUTPUT) // kv.block_tokens) + 1
    shape = EngineShape(
        kv=kv,
        num_blocks=min(needed, num_fast),
        slow_blocks=max(0, needed - num_fast),
        slow_link=CopyLink(link),
        max_batch_tokens=_STEP_TOKENS,
        max_sequences=1,
        context_tokens=context + _OUTPUT,
    )
    replica = Replica(shape, times, EngineOptions())
    (ended,) = serve(replica, [TimedRequest(0.0, RequestLengths(1, context, _OUTPUT))])
    assert ended.completion
    moments = ended.completion.metrics
    assert moments.first_token_seconds is not None
    return (_OUTPUT - 1) / (moments.finish_seconds - moments.first_token_seconds)


def found_share(num_bytes: float, memory: float) -> float:
    """Share of a round over so many bytes that is found in a memory, with pages evicted at random."""
    if num_bytes <= memory:
        return 1.0
    share = 0.0
    for _ in range(10_000):
        share = math.exp(-(1 - share) * num_bytes / memory)
    return share


def measure(hardware: str, contexts: list[int]) -> dict[str, Any]:
    """Figures of all contexts over each link."""
    row, shape = find_hardware(hardware), dense_shape()
    times, kv = data_sheet(shape, row), shape.kv
    memory = row.memory * 0.9
    weights = shape.matmul_bytes + shape.embedding_bytes
    num_fast = int((memory - weights) // kv.block_bytes)
    rows = []
    for context in contexts:
        blocks = -(-(context + _OUTPUT) // kv.block_tokens)
        whole = times.seconds(StepShape(decode_rows=1, context_tokens=context + _OUTPUT / 2, num_sequences=1))
        read = blocks * kv.block_bytes
        found: dict[str, Any] = {
            "context_tokens": context,
            "slow_blocks": max(0, blocks - num_fast),
            "large_pool_tokens_per_second": 1 / whole,
        }
        for name, link in LINKS.items():
            rate = simulated_rate(times, kv, context, num_fast, link)
            missing = (1 - found_share(weights + read, memory)) * (weights + read)
            found[name] = {
                "slow_part_tokens_per_second": rate,
                "share_of_bound": rate * (whole + max(0, blocks - num_fast) * kv.block_bytes / link),
                "all_on_host_tokens_per_second": 1 / (whole + read / link),
                "paged_tokens_per_second": 1 / (whole + missing / link),
            }
        rows.append(found)
    return {"hardware": hardware, "fast_tokens": num_fast * kv.block_tokens, "weight_bytes": weights, "contexts": rows}


def table(found: dict[str, Any]) -> str:
    """Tokens a second as Markdown."""
    names = [f"{name}: {way}" for name in LINKS for way in ("slow part", "share of bound", "all on host", "paged")]
    lines = [f"| context | large pool | {' | '.join(names)} |", f"|{'---|' * (2 + len(names))}"]
    for row in found["contexts"]:
        cells = [f"{row['context_tokens']:,}", f"{row['large_pool_tokens_per_second']:.1f}"]
        for name in LINKS:
            one = row[name]
            cells += [f"{one['slow_part_tokens_per_second']:.1f}", f"{one['share_of_bound']:.2f}"]
            cells += [f"{one['all_on_host_tokens_per_second']:.1f}", f"{one['paged_tokens_per_second']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--on", "hardware", default="rtx-4090", show_default=True)
@click.option("--contexts", default="1024,16384,32768,40960,43008,49152,65536,98304,131040", show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file of results.")
def main(hardware: str, contexts: str, output: Path | None) -> None:
    """Simulate all contexts, and print the table."""
    found = measure(hardware, list(map(int, contexts.split(","))))
    click.echo(f"{found['fast_tokens']:,} tokens in the fast part")
    click.echo(table(found))
    if output:
        output.write_text(json.dumps({"device": device_facts(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
