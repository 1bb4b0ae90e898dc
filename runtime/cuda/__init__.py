"""A launch program on a card: device, memory, weights, programs, inputs. `cuda/executor.py` puts them together."""
