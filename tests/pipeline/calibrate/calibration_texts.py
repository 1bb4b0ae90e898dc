"""Calibration texts of tests, and reading them with the demo model's tokenizer."""

import json
from pathlib import Path
from typing import Any

from ingot.pipeline.calibrate import CalibrationData, read_calibration_data
from tests.data_paths import DEMO_MODEL

WORDS = "import os\nimport sys\n\ndef main():\n    return os.path.join(sys.argv[0], 'x')\n"


def read(text: Path, sequences: int = 2, sequence_tokens: int = 16, **options: Any) -> CalibrationData:
    """Calibration data of a text, with the defaults of these tests."""
    folder = options.pop("tokenizer", DEMO_MODEL)
    return read_calibration_data(text, folder, sequences, sequence_tokens, options.pop("seed", 0), 4096, **options)


def write(file: Path, *records: object) -> Path:
    """Write one JSON record per line; a string is a line as it is."""
    file.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r, ensure_ascii=False)}\n" for r in records))
    return file
