"""Runs an IR on calibration data, one stage of linear layers at a time, with onnxruntime and numpy only.

Passes use it through passes/calibration.py; what they do with the statistics is in passes/.
"""

from ingot.pipeline.calibrate.data import CalibrationData, read_calibration_data
from ingot.pipeline.calibrate.engine import CalibrationEngine
from ingot.pipeline.calibrate.journal import open_journal, resumable
from ingot.pipeline.calibrate.overlap import HeldOutText

__all__ = ["CalibrationData", "CalibrationEngine", "HeldOutText", "open_journal", "read_calibration_data", "resumable"]
