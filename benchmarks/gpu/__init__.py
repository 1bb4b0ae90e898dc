"""Launch programs on a GPU, measured next to torch with the same shapes; `python -m benchmarks.gpu`."""
