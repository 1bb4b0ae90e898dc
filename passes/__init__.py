"""IR -> IR: one rewrite or one quantizer per file, listed by name in `registry`."""
