"""Parts of the GPU benchmark that show whether kernels are right, and what they compare with. No times."""
