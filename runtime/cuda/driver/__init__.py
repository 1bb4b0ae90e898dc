"""The device as executors use it, and its implementation by the CUDA driver API. Programs and pools belong above."""
