"""Checkpoints in the formats of other tools: export, transcode, import, lint."""
