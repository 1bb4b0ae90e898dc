"""MTP layers have the logits of transformers' layer, as programs of the native engine with the weights of the model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ingot.artifact.programs.cpu_program import OPERATIONS_FILE, WEIGHTS_FILE, read_cpu_program
from ingot.artifact.programs.draft_head import DRAFT_HEAD_FILE, HIDDEN, HIDDEN_STATES, read_draft_head
from ingot.artifact.safetensors import MappedTensors
from ingot.passes.manager import PassManager
from ingot.passes.model_facts import KV
from ingot.passes.registry import make_pass
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.model.importer import ModelSource
from ingot.pipeline.targets.cpu.draft_head import HeadModel, lower_head
from ingot.pipeline.targets.cpu.lowering import lower_to_operations
from ingot.pipeline.targets.cpu.writer import write_lowered
from ingot.pipeline.targets.recurrent_layers import with_states
from ingot.runtime.cpu.kv_pool import KVPool
from ingot.runtime.cpu.native.library import native_library
from ingot.runtime.cpu.native.program import NativeProgram
from ingot.runtime.cpu.state_pool import make_states
from tests.each_case import each_case
from tests.parity import MTP_CHECKPOINTS, MTP_LOGITS, compare
from tests.runtime.cuda.batches import Growing
from tests.simulators.cpu_programs import LOWERING, PACKED

pytestmark = pytest.mark.skipif(native_library() is None, reason="the library was not built")

FAMILIES = ("deepseek_v3", "glm4_moe", "mimo", "qwen3_5_text", "qwen3_next")
BLOCKS = 16


def _written(family: str, folder: Path) -> None:
    source = ModelSource(Checkpoint.open(MTP_CHECKPOINTS / family))
    model, head = source.copy(), source.mtp_head()
    assert head is not None
    for each in (model, head):
        PassManager([make_pass(name) for name in (*PACKED, *LOWERING)]).run(each)
    KV.record(model, with_states(KV.of(model), model.graph))
    lowered = lower_to_operations(model)
    heads = lower_head(model, HeadModel(head, source.mtp_hidden_state, source.last_norm), "float32")
    write_lowered(lowered, folder, heads)


def _program(made: Any, folder: Path) -> NativeProgram:
    weights, states = MappedTensors(folder / WEIGHTS_FILE), make_states(made.kv, 2 if made.kv.state_bytes else 0)
    return NativeProgram(made, weights, KVPool(made.kv, BLOCKS), states, max_batch_tokens=32, num_threads=1)


@each_case("family", FAMILIES)
def test_a_layer_predicts_what_transformers_predicts(family: str, tmp_path: Path) -> None:
    _written(family, tmp_path)
    heads = read_draft_head(tmp_path / DRAFT_HEAD_FILE)
    program = _program(heads.head, tmp_path)
    expected = np.load(MTP_CHECKPOINTS / family / MTP_LOGITS)
    for index in range(3):
        tokens, hidden = expected[f"tokens_{index}"].astype(np.int64), expected[f"hidden_{index}"]
        growing = Growing([tokens[1:]], [list(range(BLOCKS))])
        made, at = [], 0
        for count in (len(hidden) - 3, 1, 2):
            program.rows_of(HIDDEN_STATES)[:count] = hidden[at : at + count]
            made.append(program.step(growing.step([count])).copy())
            at += count
        parity = compare([np.concatenate(made)], [expected[f"logits_{index}"]])
        assert parity.worst <= parity.limit


@each_case("family", FAMILIES)
def test_the_model_with_hidden_states_has_the_bits_of_the_model(family: str, tmp_path: Path) -> None:
    _written(family, tmp_path)
    heads, plain = read_draft_head(tmp_path / DRAFT_HEAD_FILE), read_cpu_program(tmp_path / OPERATIONS_FILE)
    expected = np.load(MTP_CHECKPOINTS / family / MTP_LOGITS)
    tokens, hidden = expected["tokens_0"].astype(np.int64), expected["hidden_0"]
    made: list[list[NDArray[np.float32]]] = [[], []]
    states: list[NDArray[np.float32]] = []
    for program, logits in zip((_program(plain, tmp_path), _program(heads.model, tmp_path)), made, strict=True):
        growing = Growing([tokens], [list(range(BLOCKS))])
        for count in (len(tokens) - 3, 1, 2):
            logits.append(program.step(growing.step([count])).copy())
            if logits is made[1]:
                states.append(program.rows_of(HIDDEN)[:count].copy())
    assert np.concatenate(made[0]).tobytes() == np.concatenate(made[1]).tobytes()
    parity = compare([np.concatenate(states)[:-1]], [hidden])
    assert parity.worst <= parity.limit
