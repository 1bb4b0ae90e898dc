"""Measure what a simulated request costs: a fleet that serves a Poisson load, in processor time and memory.

    python -m benchmarks.planning.fleet_scale --requests 100000 --replicas 256

Requests have 200 prompt and 100 output tokens at the median, and come at two a second for each replica.
"""

import resource
import time

import click

from ingot.artifact import KVGeometry
from ingot.cli.compiler.simulate import stated_times
from ingot.planning.simulation.deployment import Deployment
from ingot.planning.simulation.figures import parse_service_level
from ingot.planning.simulation.routers import ROUTERS
from ingot.planning.simulation.simulated_executor import EngineShape
from ingot.planning.simulation.traffic import RequestSizes, parse_traffic
from ingot.runtime.options import EngineOptions

_CONTEXT = 4096
_KV = KVGeometry(num_layers=32, num_kv_heads=8, head_dim=128, dtype="float16", block_tokens=64)
_ENGINE = EngineShape(kv=_KV, num_blocks=1000, max_batch_tokens=2048, max_sequences=64, context_tokens=_CONTEXT)
_TIMES = "steps=0.008,num_sequences=0.0001,prefill_tokens=0.00002,context_tokens=0.00000001"


@click.command(help=__doc__)
@click.option("--requests", type=click.IntRange(min=1), default=10_000, show_default=True)
@click.option("--replicas", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--router", type=click.Choice(sorted(ROUTERS)), default="round-robin", show_default=True)
def main(requests: int, replicas: int, router: str) -> None:
    """Simulate, and print the cost."""
    deployment = Deployment(
        shape=_ENGINE, times=stated_times(_TIMES), options=EngineOptions(), replicas=replicas, router=router
    )
    sizes = RequestSizes(prompt_tokens=200, output_tokens=100)
    traffic = parse_traffic(f"poisson:{2 * replicas}", sizes=sizes, count=requests, context_tokens=_CONTEXT)
    before = time.process_time()
    found = deployment.run(traffic, parse_service_level("chat"))
    seconds = time.process_time() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    click.echo(
        f"{found.num_finished:,} of {requests:,} requests on {replicas} replicas, {router}: {seconds:.1f} s of"
        f" processor time, {seconds / requests * 1e6:.0f} us a request, {found.num_steps:,} steps, {peak} MiB"
    )


if __name__ == "__main__":
    main()
