"""GPU kernels in Triton's interpreter, each against numpy."""
