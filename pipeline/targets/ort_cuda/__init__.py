"""The target ort-cuda: segments between attentions as ONNX files, run by onnxruntime's CUDA provider."""
