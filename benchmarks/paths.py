"""Folders of the benchmarks."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GPU_PROGRAMS = ROOT / "benchmarks" / "gpu-programs"  # what benchmarks.gpu.programs.write packs; ignored by git
GPU_CONTACT = ROOT / "gpu-contact"  # what is copied to the GPU's machine; ignored by git
CHECKPOINTS = ROOT / "tests" / "fixtures" / "checkpoints"
