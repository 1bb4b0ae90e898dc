"""The CPU attention kernel in C and its binding; the numpy form stands in where it was not built."""
