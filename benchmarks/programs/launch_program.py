"""The demo model's launch program in Triton's interpreter against the onnxruntime executor: logits and greedy tokens.

    python -m benchmarks.programs.launch_program [--tokens 24] [-o benchmarks/results/launch-program.json]

Takes minutes: the interpreter runs every program of every launch in Python. It says nothing about a GPU's speed.
"""

import argparse
import json
import os
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported

from tests.runtime.cuda.demo_model import PROMPT, TOLERANCES, compare

import ingot
from benchmarks.paths import RESULTS
from ingot.artifact import Artifact
from ingot.artifact.programs.launch_program import ActivationType
from ingot.builder import build

CASES: tuple[tuple[str, ActivationType], ...] = (
    ("float", "fp32"),
    ("float", "fp16"),
    ("int4", "fp32"),
    ("int4", "fp16"),
)
OUTPUT = RESULTS / "launch-program.json"


def main() -> None:
    """Run all cases, print a row each, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=24, help="greedy tokens to compare (default: 24)")
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        rows = [_row(weights, activations, given.tokens, Path(folder)) for weights, activations in CASES]
    versions = {"ingot": ingot.__version__} | {
        name: version(name) for name in ("triton", "torch", "onnxruntime", "numpy")
    }
    content = {"prompt": PROMPT, "versions": versions, "rows": rows}
    given.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _row(weights: str, activations: ActivationType, tokens: int, folder: Path) -> dict[str, object]:
    def reference(recipe: str, checkpoint: Path, *overrides: str) -> Artifact:
        unmeasured = ("evaluation=null", "latency=null", "gates={}")
        output = folder / f"{weights}-{activations}-cpu"
        return build(recipe, [f"checkpoint={checkpoint}", *unmeasured, *overrides], output).artifact

    compared = compare(weights, activations, tokens, folder / f"{weights}-{activations}", reference)
    equal = sum(one == other for one, other in zip(compared.found, compared.wanted, strict=True))
    print(
        f"{weights:6} {activations}: {equal} of {tokens} greedy tokens equal, logits within {compared.logits_error:.2e}"
    )
    return {
        "weights": weights,
        "activations": activations,
        "tokens": tokens,
        "equal_tokens": equal,
        "logits_error": compared.logits_error,
        "tolerance": TOLERANCES[activations],
    }


if __name__ == "__main__":
    main()
