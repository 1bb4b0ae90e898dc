"""`python -m benchmarks.gpu` runs the parts of the GPU benchmark: see run.py."""

from benchmarks.gpu.run import main

main()
