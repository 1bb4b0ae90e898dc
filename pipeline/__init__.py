"""Compiler: checkpoint -> IR -> passes -> segments -> program. Imports neither torch nor the runtime."""
