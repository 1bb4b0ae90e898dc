"""`python -m benchmarks.gpu.programs` packs what the GPU benchmark needs: see write.py."""

from benchmarks.gpu.programs.write import main

main()
