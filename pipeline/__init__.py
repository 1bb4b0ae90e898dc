"""Compiler: checkpoint -> IR -> passes -> segments -> program.

Imports no torch; of the runtime only what `calibrate` runs segments with.
"""
