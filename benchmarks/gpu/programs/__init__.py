"""What travels to the GPU's machine: `python -m benchmarks.gpu.programs` packs it, see write.py."""
