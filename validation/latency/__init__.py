"""Measures latency of candidate and baseline under the same load, until its gates are decided.

What the numbers of all measurements have in common belongs to validation/statistics.py.
"""
