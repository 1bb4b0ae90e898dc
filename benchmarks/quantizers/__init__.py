"""Ingot's quantizers next to the packages they replace: accuracy, time, memory, exported formats."""
