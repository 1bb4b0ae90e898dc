"""The process that builds a plan: its exit code, and the reason in the last line of its log."""

import json
import subprocess
import sys
from pathlib import Path

import onnx_ir as ir
import pytest

from ingot.pipeline.targets.tensorrt.build_worker import REFUSED
from ingot.pipeline.targets.tensorrt.library import load_library
from ingot.pipeline.targets.tensorrt.plan_request import PlanRequest, Profile

pytest.importorskip("tensorrt_rtx", reason="plans are built by TensorRT-RTX: pip install '.[tensorrt]'")


def reason(request: Path, plan: Path) -> str:
    """Run the process, which must refuse the request; return the last message of its log."""
    command = [sys.executable, "-m", "ingot.pipeline.targets.tensorrt.build_worker", str(request), str(plan)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == REFUSED
    assert not plan.exists()
    return str(json.loads(done.stderr.splitlines()[-1])["message"])


def test_a_request_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert "request.json" in reason(tmp_path / "request.json", tmp_path / "segment.plan")


def test_a_node_that_the_library_has_no_form_for_is_named(tmp_path: Path) -> None:
    kind, shape = ir.TensorType(ir.DataType.FLOAT16), ir.Shape(["T", 64])
    x, y = (ir.Value(name=name, type=kind, shape=shape) for name in "xy")
    twist = ir.node("Twist", [x], domain="acme", name="layers.0.twist", outputs=[y])
    graph = ir.Graph([x], [y], nodes=[twist], opset_imports={"": 24, "acme": 1}, name="segment")
    file, library = str(tmp_path / "segment.onnx"), load_library()
    ir.save(ir.Model(graph, ir_version=11), file)
    request = PlanRequest(file, None, {"x": (64,)}, (), (Profile(1, 8, 8),), (89,), library.name, library.version)
    (tmp_path / "request.json").write_text(request.to_json())
    message = reason(tmp_path / "request.json", tmp_path / "segment.plan")
    assert message.startswith(f"{library.name} {library.version} refuses 'layers.0.twist' (Twist): ")
