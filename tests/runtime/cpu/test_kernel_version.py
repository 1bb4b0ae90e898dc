"""The text that separates the kernels of one machine from those of another."""

from pathlib import Path

import onnxruntime  # type: ignore[import-untyped]

from ingot.runtime import cpu
from ingot.runtime.code_version import code_version
from ingot.runtime.cpu.kernel_version import kernel_version
from ingot.runtime.cpu.native.attention import attention_backend


def test_it_names_onnxruntime_the_attention_backend_and_the_processor() -> None:
    version = kernel_version()
    assert f"onnxruntime {onnxruntime.__version__}" in version
    assert attention_backend() in version
    assert code_version(Path(cpu.__file__).parent) in version
    assert version == kernel_version()
