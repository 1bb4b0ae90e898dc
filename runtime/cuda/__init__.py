"""A launch program on a card: device, memory, weights, programs, inputs. `executors/cuda.py` puts them together."""
