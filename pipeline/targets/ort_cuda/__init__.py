"""The target ort-cuda: segments between attentions run by onnxruntime's CUDA provider. What TensorRT's segments share
with them is in `segments`, the kernels between them in `cuda`."""
