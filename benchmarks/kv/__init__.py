"""The KV cache outside of the device: what damages its files, and which blocks its policies keep."""
