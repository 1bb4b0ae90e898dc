"""Checkpoints: files, config.json, the table of families, tensor names; formats/ decodes quantized weights.

What becomes of a checkpoint is not here: the IR is built in pipeline.model.
"""
