"""Reads config.json of each model family into a DecoderConfig, or refuses it with the key and what is allowed.

Nothing here reads weights; tensors.py compares them with the configuration.
"""
