"""What passes decided, as evidence: the scales, rotations, bits, masks and steps that they chose, in passes.json.

A pass leaves its facts in the IR's metadata as JSON under "ingot.NAME", NAME being its own; its docstring says what
they are. Statistics of each quantized weight are not among them: these are in quantization.json.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.passes.registry import pass_names

PASSES_FILE = "passes.json"
_PREFIX = "ingot."


def pass_facts(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Pass name -> its facts, of the passes that left any."""
    return {name: json.loads(metadata[key]) for name in pass_names() if (key := f"{_PREFIX}{name}") in metadata}


def write_pass_facts(metadata: Mapping[str, str], folder: Path) -> None:
    """Write passes.json into `folder` (made if missing); nothing where no pass left facts."""
    found = pass_facts(metadata)
    if found:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PASSES_FILE).write_text(json.dumps(found, indent=2, sort_keys=True) + "\n", encoding="utf-8")
