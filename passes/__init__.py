"""Passes from IR to IR: one registered pass per file, by kind, and what passes share.

The numpy algorithms without an IR are in `numerics/`; what runs on calibration data is in `ingot.pipeline.calibrate`.
"""

from ingot.passes.base import Pass
from ingot.passes.manager import PassManager, PassRecord, print_after, save_after_each, timing_table
from ingot.passes.printing import model_to_text
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
