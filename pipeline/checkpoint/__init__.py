"""Checkpoints: safetensors and GGUF files, config.json, the table of families, tensor names."""
