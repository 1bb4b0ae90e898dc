"""The benchmark of adapters: which sequence has which, and that every layer but the head is changed."""

from pathlib import Path

import numpy as np
from benchmarks.cpu.lora import make_adapter, measure, settings_of
from benchmarks.cpu.profile_step import Step

from ingot.artifact import Artifact
from ingot.artifact.programs.cpu_program import Linear
from ingot.runtime.cpu.native_executor import NativeExecutor
from tests.runtime.cpu.native.kernel_cases import needs_library
from tests.runtime.cpu.native.tiny_program import BLOCK_TOKENS, tiny_program, write_artifact


def test_sequences_share_the_adapters() -> None:
    settings = settings_of(Step(32, 1, 8).batch(tiny_program()))
    slots = {name: batch.adapter_slots for name, batch in settings.items()}
    assert slots["none"] is None
    assert {name: len(np.unique(each)) for name, each in slots.items() if each is not None} == {
        "1": 1, "4": 4, "16": 16, "half": 17
    }  # fmt: skip
    assert list(settings_of(Step(1, 64, 0).batch(tiny_program()))) == ["none", "1"]


def test_every_row_of_every_layer_but_the_head_is_changed() -> None:
    program = tiny_program()
    adapter = make_adapter(program, 3, 0, "bfloat16")
    layers = {one.node: program.matrices[one.matrix] for one in program.operations if isinstance(one, Linear)}
    assert adapter.changes.keys() == layers.keys() - {"head"}
    for node, changes in adapter.changes.items():
        assert sum(len(change.b) for change in changes) == layers[node].n
        assert changes[0].first_row == 0
        assert all((change.a.view(np.uint32) & 0xFFFF == 0).all() for change in changes)


@needs_library
def test_figures_are_ratios_to_the_step_without_adapters(tmp_path: Path) -> None:
    artifact: Artifact = write_artifact(tmp_path / "tiny")
    executor = NativeExecutor(artifact, num_blocks=4 * BLOCK_TOKENS, num_threads=1, max_adapters=16)
    for slot in range(16):
        executor.load_adapter(slot, make_adapter(tiny_program(), 2, slot, "float32"))
    figures = measure(executor, "batch 4", Step(4, 1, 8).batch(tiny_program()), rounds=2)
    assert [(figure.step, figure.adapters) for figure in figures] == [("batch 4", name) for name in ("none", "1", "4")]
    assert figures[0].ratio == 1
    executor.close()
