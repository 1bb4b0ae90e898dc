"""Files for the GPU's machine: `python -m benchmarks.gpu.programs` packs them, see write.py."""
