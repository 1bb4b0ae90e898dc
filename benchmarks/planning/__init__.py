"""Scores of predictions against rows that were measured elsewhere."""
