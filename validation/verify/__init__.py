"""Proves that no feature of the runtime changes an answer: each pair of features against the plain path.

    subject = open_subject(artifact)                    # what is verified: anything that loads an Engine
    result = verify(subject, VerifyOptions())           # runs the plain path, then every cell of the matrix
    result.verdict                                      # PASS or FAIL, with the pair and the command that repeats it

requests.py has the prompts, features.py a row per feature, scenario.py runs a plan, compare.py finds the first
difference. Nothing here needs the compiler: users verify on the machine that serves.
"""

from ingot.validation.verify.features import FEATURES, Feature
from ingot.validation.verify.matrix import VerifyOptions, cell_names, verify
from ingot.validation.verify.result import CellResult, VerifyResult
from ingot.validation.verify.subject import Subject, open_subject

__all__ = [
    "FEATURES",
    "CellResult",
    "Feature",
    "Subject",
    "VerifyOptions",
    "VerifyResult",
    "cell_names",
    "open_subject",
    "verify",
]
