"""IR -> IR: one rewrite or one quantizer per file, listed by name in `registry`."""

from ingot.passes.base import Pass
from ingot.passes.manager import PassManager, PassRecord, timing_table
from ingot.passes.printing import model_to_text, print_after, save_after_each
from ingot.passes.registry import load_pass_class, make_pass, pass_names

__all__ = [
    "Pass",
    "PassManager",
    "PassRecord",
    "load_pass_class",
    "make_pass",
    "model_to_text",
    "pass_names",
    "print_after",
    "save_after_each",
    "timing_table",
]
