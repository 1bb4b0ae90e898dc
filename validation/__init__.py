"""Artifact + baseline -> evidence, gates, report."""
