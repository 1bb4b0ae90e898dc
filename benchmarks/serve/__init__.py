"""Benchmarks of `ingot serve` under load. Its overhead next to an engine in process: `benchmarks.cpu.serve`."""
