"""Segments of the IR between attention nodes: what the onnxruntime and TensorRT targets share."""
