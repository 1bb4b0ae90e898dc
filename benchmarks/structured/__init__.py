"""Structured output: many constrained generations, masks against brute force, and the time of masks."""
