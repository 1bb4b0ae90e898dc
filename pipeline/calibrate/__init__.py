"""Runs an IR on calibration data, one stage of linear layers at a time, in onnxruntime and numpy alone."""

from ingot.pipeline.calibrate.data import CalibrationData, read_calibration_data
from ingot.pipeline.calibrate.engine import CalibrationEngine
from ingot.pipeline.calibrate.journal import open_journal, resumable

__all__ = ["CalibrationData", "CalibrationEngine", "open_journal", "read_calibration_data", "resumable"]
