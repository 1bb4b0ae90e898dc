"""One file per engine: each runs as a process of its own and answers measurements over a pipe. See base.py."""
