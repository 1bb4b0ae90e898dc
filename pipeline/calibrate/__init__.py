"""Runs an IR on calibration data, one stage of linear layers at a time, in onnxruntime and numpy alone."""

from ingot.pipeline.calibrate.data import CalibrationData, read_calibration_data
from ingot.pipeline.calibrate.engine import CalibrationEngine

__all__ = ["CalibrationData", "CalibrationEngine", "read_calibration_data"]
