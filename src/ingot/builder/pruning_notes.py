"""What a build knows of what it pruned, as evidence: the passes' statistics in evidence/pruning.json."""

import json
from collections.abc import Mapping
from pathlib import Path

from ingot.passes.pruning.pruned_facts import MASKS_KEY, STRUCTURE_KEY

PRUNING_FILE = "pruning.json"
_SECTIONS = {"structure": STRUCTURE_KEY, "weights": MASKS_KEY}


def write_pruning(facts: Mapping[str, str], folder: Path) -> None:
    """Write pruning.json into `folder` (made if missing): {structure: shapes and sites, weights: one record each}.

    A part that no pass wrote into the IR's metadata `facts` is left out; nothing is written where nothing was pruned.
    """
    found = {name: json.loads(facts[key]) for name, key in _SECTIONS.items() if key in facts}
    if "weights" in found:
        found["weights"] = found["weights"]["weights"]
    if found:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(found, indent=2, sort_keys=True) + "\n"
        (folder / PRUNING_FILE).write_text(text, encoding="utf-8")
