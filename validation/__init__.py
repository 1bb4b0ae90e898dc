"""Measures an artifact against its baseline: accuracy, latency, memory and size, with intervals, gates and a report.

What a build measures, and against which baseline, is decided in ingot.builder.
"""
