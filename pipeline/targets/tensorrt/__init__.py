"""The target tensorrt: segments between attentions as TensorRT plans, built ahead of time and without a GPU. What
onnxruntime segments share with them is in `segments`, the kernels between them in `cuda`."""
