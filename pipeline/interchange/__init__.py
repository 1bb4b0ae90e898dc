"""Other tools' checkpoints: export, transcode, import and lint, and the one table of formats (formats.py).

Layouts of single layers are in pipeline/checkpoint/formats; reading a checkpoint for a build is in pipeline/checkpoint.
"""
