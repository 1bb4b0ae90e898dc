"""Batch-invariant programs on a GPU: a row has the same bits alone, in a batch, in chunks, token by token."""

from pathlib import Path

import numpy as np
import pytest

from ingot.pipeline.targets.cuda.lower import fixed_splits
from ingot.pipeline.targets.cuda.lowering import lower_to_launches
from ingot.runtime.cuda.driver import driver
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.options import EngineOptions
from tests.pipeline.targets.cuda.test_batch_invariance import FORMS, INVARIANT, logits_under_all_steps
from tests.runtime.cuda.artifacts import CONTEXT, seal_compiled
from tests.simulators.launch_programs import CHECKPOINTS, Entry, fused, imported

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("quantization", FORMS.values(), ids=FORMS)
def test_a_row_has_the_same_bits_in_every_batch(
    quantization: tuple[Entry, ...], gpu_sm: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixed_splits, "_LEAST_SPLIT", CONTEXT // 2)
    model = fused(imported(CHECKPOINTS / "llama", *quantization))
    lowered = lower_to_launches(model, INVARIANT, "fp16", batch_invariant=True)
    artifact = seal_compiled(tmp_path / "artifact", lowered, model, gpu_sm)
    alone, *others = logits_under_all_steps(
        lambda: CudaExecutor(artifact, driver.open_device(), EngineOptions(kv_blocks=24))
    ).items()
    for name, rows in others:
        different = np.flatnonzero((rows.view(np.int32) != alone[1][: len(rows)].view(np.int32)).any(axis=1))
        assert not different.size, f"{name}: rows {different}"
