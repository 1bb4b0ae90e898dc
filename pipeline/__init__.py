"""Compiler: checkpoint -> IR -> passes -> segments -> program. Imports no torch, and only calibrate imports of the runtime."""
