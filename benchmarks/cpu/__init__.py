"""The CPU engine next to llama.cpp and onnxruntime-genai, and what bounds it."""
