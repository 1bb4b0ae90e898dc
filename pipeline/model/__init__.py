"""Checkpoint -> IR: the decoder graph of every family, its rotary tables, and the importer.

Passes, which change that graph, are in ingot.passes; reading files is in pipeline.checkpoint.
"""
