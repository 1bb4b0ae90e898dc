"""What the CUDA targets build."""
