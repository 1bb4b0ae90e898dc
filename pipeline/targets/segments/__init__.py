"""Segments of the IR between attention nodes, and the launch programs that call them: shared by the targets that leave
them to another engine (onnxruntime, TensorRT). The forms that one engine alone takes belong in that engine's folder."""
