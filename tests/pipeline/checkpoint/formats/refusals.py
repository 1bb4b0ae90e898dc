"""Exported checkpoints with a changed quantization_config."""

from pathlib import Path
from typing import Any

import pytest

from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import import_checkpoint
from tests.pipeline.checkpoint.formats.tiny_model import edit_quantization, exported

LAYER = "model.layers.1.mlp.up_proj"  # a layer of the exported model


def assert_setting_is_refused(folder: Path, format_name: str, changes: dict[str, Any], message: str) -> None:
    """Export the tiny model in this format, change its settings, and import it."""
    out = exported(folder, format_name)
    edit_quantization(out, changes)
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(Checkpoint.open(out))
