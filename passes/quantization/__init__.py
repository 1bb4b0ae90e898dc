"""Weights and activations to fewer bits: quantizers, and passes that prepare, choose for or tune what they round."""
