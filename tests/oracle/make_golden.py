"""Make tests/fixtures/golden: greedy tokens of transformers, in float32, for the small models of examples/models.

pip install --group oracle
python -m tests.oracle.make_golden
"""

# mypy: disable-error-code="no-untyped-call"

import json
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.data_paths import ROOT

MODELS = ("stdlib-hybrid-4m", "stdlib-mixture-6m")
PROMPT = "import os\nimport sys\n\n\ndef read_file(path):\n"
NUM_TOKENS = 200


def main() -> None:
    """Write a file for each model."""
    for name in MODELS:
        folder = ROOT / "examples" / "models" / name
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        prompt = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
        tokens = model.generate(prompt, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False)[0]
        golden = {"prompt": prompt[0].tolist(), "greedy": tokens[prompt.shape[1] :].tolist()}
        target = ROOT / "tests" / "fixtures" / "golden" / f"{name}.json"
        target.write_text(json.dumps(golden) + "\n", "utf-8")


if __name__ == "__main__":
    main()
