"""The targets cuda-smXX: a launch program of Ingot's own kernels, compiled to cubins ahead of time and without a GPU.
Segments that another engine runs belong in `segments`; the kernels' sources are in `ingot.kernels`."""
