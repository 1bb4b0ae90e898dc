"""The target tensorrt: segments between attentions as TensorRT plans, built ahead of time and without a card."""
