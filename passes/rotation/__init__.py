"""Rotations of channels that keep the model's function."""
