"""Benchmarks of `ingot serve` under load. The overhead of the server next to an engine in process is in `benchmarks.cpu.serve`."""
