"""What compilers make of kernels and segments, checked without a GPU."""
