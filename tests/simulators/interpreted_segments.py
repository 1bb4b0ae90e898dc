"""Segments of launch programs in onnxruntime, on the memory of the interpreted device."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from ingot.artifact.programs.launch_program import SegmentCall
from ingot.runtime.cuda.driver.device import Queue
from tests.sessions import Level, plain_session
from tests.simulators.interpreted_device import InterpretedDevice

_DTYPES: dict[str, Any] = {"fp32": np.float32, "i64": np.int64, "i8": np.int8}


class InterpretedSegments:
    """Runs segments in onnxruntime on the memory at a call's addresses. Implements `SegmentBinder`."""

    version = "segments 1"

    def __init__(self, device: InterpretedDevice, models: Mapping[str, ir.Model]) -> None:
        self._device = device
        self._sessions = {file: plain_session(model, Level.ORT_DISABLE_ALL) for file, model in models.items()}
        self.num_runs = 0

    def __call__(self, call: SegmentCall, addresses: Mapping[str, int]) -> Queue:
        session = self._sessions[call.file]

        def run() -> None:
            self.num_runs += 1
            feeds = {name: self._array(call, name, addresses[name]) for name in call.inputs}
            results = session.run(list(call.outputs), feeds)
            for name, result in zip(call.outputs, results, strict=True):
                self._device.view(addresses[name], result.nbytes)[:] = result.reshape(-1).view(np.uint8)

        return lambda stream: self._device.queue(stream, run)

    def close(self) -> None:
        """Free nothing: it has no device memory."""

    def _array(self, call: SegmentCall, name: str, address: int) -> Any:
        dtype, shape = _DTYPES[call.inputs[name].type], call.shapes[name]
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self._device.view(address, size).view(dtype).reshape(shape)
