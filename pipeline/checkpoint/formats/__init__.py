"""Quantized checkpoint formats: what other tools write, read bit for bit, and written so that they can read it."""
