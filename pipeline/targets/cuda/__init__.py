"""What the CUDA targets build: kernels to cubins, ahead of time and without a card."""
