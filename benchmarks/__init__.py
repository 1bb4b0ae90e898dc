"""Benchmarks against peers: see docs/benchmarks.md. Nothing here is imported by Ingot, nothing here is a test."""
