"""Tiers and the verification of drafts on a GPU: real copies next to real kernels, tokens as on the plain path."""

from pathlib import Path

import numpy as np
import pytest

from ingot.artifact import Artifact
from ingot.errors import EngineError
from ingot.runtime import Engine, SamplingParams
from ingot.runtime.kv.transfers.transfer import Transfer
from ingot.runtime.options import EngineOptions
from ingot.runtime.speculation.length_control import LengthControl
from ingot.runtime.speculation.speculator import Speculator
from ingot.validation.verify import VerifyOptions, open_subject, verify
from tests.gpu.conftest import MakeExecutor
from tests.runtime.cuda.batches import Growing, greedy, token_ids
from tests.simulators.fake_drafters import KnowingDrafter

pytestmark = pytest.mark.gpu

PROMPTS: list[list[int]] = [token_ids(count, seed).tolist() for seed, count in enumerate((21, 18, 30, 13, 26, 22))]
PARAMS = [
    SamplingParams(max_tokens=12, ignore_eos=True, temperature=temperature, seed=seed)
    for seed, temperature in enumerate((0.0, 0.8, 0.0, 0.0, 0.7, 0.0))
]
PROMPT, OTHER = token_ids(12, 0), token_ids(12, 1)
FEW_BLOCKS = 16  # of 4 tokens: one prompt and little more


def wait(*transfers: Transfer) -> None:
    while not all(transfer.done for transfer in transfers):
        pass
    assert [transfer.error for transfer in transfers] == [None] * len(transfers)


@pytest.fixture(scope="module")
def plain(launches: Artifact) -> list[tuple[int, ...]]:
    """Tokens of PROMPTS, each alone, nothing cached."""
    with Engine.load(launches, kv_blocks=64, prefix_cache=False) as engine:
        return [engine.generate(*each).token_ids for each in zip(PROMPTS, PARAMS, strict=True)]


def test_blocks_come_back_with_their_bits_while_steps_run(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    host = executor.host_blocks(8)
    for slot in range(8):
        host.view(slot)[:] = np.random.default_rng(slot).integers(0, 256, len(host.view(slot)))
    wanted = [host.view(slot).copy() for slot in range(8)]
    busy = Growing([token_ids(60, 5)], [list(range(20, 35))])
    steps = [executor.submit(busy.step([12], "last"), greedy(1), np.full(12, -1, np.int32))]
    restores = [host.restore(slot, slot) for slot in range(8)]
    for _ in range(20):
        steps.append(executor.submit(busy.step([1], "last"), greedy(1), np.full(1, -1, np.int32)))
    wait(*restores)
    for slot in range(8):
        host.view(slot)[:] = 0
        executor.copy_block(slot, 10 + slot)  # a save waits for the copy
    saves = [host.save(10 + slot, slot) for slot in range(8)]
    wait(*saves)
    assert all(0 < transfer.seconds < 0.1 for transfer in (*restores, *saves))
    for slot, content in enumerate(wanted):
        np.testing.assert_array_equal(host.view(slot), content)
    assert all(step.tokens().shape == (1,) for step in steps)


def test_a_sequence_resumes_from_blocks_that_were_saved_and_restored(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    undisturbed = Growing([PROMPT], [[7, 2, 11]])
    executor.forward(undisturbed.step([8], "none"))
    wanted = executor.forward(undisturbed.step([4])).copy()
    host = executor.host_blocks(4)
    sequence = Growing([PROMPT], [[15, 16, 17]])
    executor.forward(sequence.step([8], "none"))
    wait(host.save(15, 3), host.save(16, 1))
    executor.forward(Growing([OTHER], [[16, 15, 18]]).step([12], "none"))  # another sequence uses the blocks now
    wait(host.restore(3, 43), host.restore(1, 44))
    sequence.tables = np.array([[43, 44, 45]], np.int32)
    np.testing.assert_array_equal(executor.forward(sequence.step([4])), wanted)
    executor.write_block(46, host.view(3).tobytes())
    assert executor.read_block(46) == executor.read_block(43)


def test_restored_prompts_have_the_tokens_of_the_plain_path(
    launches: Artifact, plain: list[tuple[int, ...]], tmp_path: Path
) -> None:
    options = EngineOptions(
        kv_blocks=FEW_BLOCKS,
        kv_host_bytes=1 << 22,
        kv_disk_path=tmp_path,
        kv_disk_bytes=1 << 24,
        kv_restore="always",  # so small a model may be computed faster
    )
    with Engine.load(launches, **vars(options)) as engine:
        for _ in range(3):
            found = [engine.generate(*each) for each in zip(PROMPTS, PARAMS, strict=True)]
            assert [one.token_ids for one in found] == plain
            engine.check()
        assert all(one.cached_tokens_by_tier.host for one in found)
    with Engine.load(launches, **vars(options)) as engine:
        found = [engine.generate(*each) for each in zip(PROMPTS, PARAMS, strict=True)]
        assert [one.token_ids for one in found] == plain
        assert all(one.cached_tokens_by_tier.disk for one in found)


def test_preempted_requests_are_swapped_with_the_tokens_of_the_plain_path(
    launches: Artifact, plain: list[tuple[int, ...]]
) -> None:
    with Engine.load(launches, kv_blocks=FEW_BLOCKS, kv_host_bytes=1 << 22, kv_restore="always") as engine:
        for _ in range(3):
            assert [one.token_ids for one in engine.generate(PROMPTS, PARAMS)] == plain
            engine.check()
        metrics = engine.metrics()
        assert metrics.num_preemptions > 0
        assert metrics.kv_tiers is not None
        assert metrics.kv_tiers.restored_blocks > 0
        assert metrics.kv_tiers.failed_transfers == 0


@pytest.mark.parametrize("cell", ["host-restore", "disk-restore", "swap", "host-restore+lookup", "swap+lookup"])
def test_the_cells_of_verify_pass(launches: Artifact, cell: str) -> None:
    result = verify(open_subject(launches), VerifyOptions(quick=True, only=(cell,)))
    assert {one.name: one.differences or one.exercised for one in result.failures} == {}


def test_a_token_is_chosen_from_every_row_of_logits_however_many_the_head_has(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    ids, tables = [token_ids(7, 1), token_ids(6, 2)], [[3, 4], [5, 6]]
    logits = executor.forward(Growing(ids, tables).step([7, 6])).copy()  # 13 rows; the head has 4
    step = executor.submit(Growing(ids, tables).step([7, 6]), greedy(13), np.full(13, -1, np.int32))
    assert step.tokens().tolist() == logits.argmax(axis=1).tolist()


def test_verified_drafts_have_the_tokens_of_the_plain_path(
    make_executor: MakeExecutor, launches: Artifact, plain: list[tuple[int, ...]]
) -> None:
    by_prompt = dict(zip(map(tuple, PROMPTS), plain, strict=True))
    executor = make_executor()
    vocabulary = executor.model.vocab_size
    speculator = Speculator(
        KnowingDrafter(lambda prompt, params: by_prompt[prompt], vocabulary, error_rate=0.3),
        vocab_size=vocabulary,
        num_draft_tokens=5,
        control=LengthControl(adapts=False),
    )
    with Engine(executor, max_sequences=executor.max_sequences, speculator=speculator) as engine:
        assert [one.token_ids for one in engine.generate(PROMPTS, PARAMS)] == plain
        counted = engine.metrics().speculation
        assert counted is not None
        assert 0 < counted.num_accepted_tokens < counted.num_tested_tokens


def test_host_memory_that_the_machine_lacks_is_refused(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    with pytest.raises(EngineError, match="kv_host_bytes"):
        executor.host_blocks((1 << 50) // executor.kv_geometry.block_bytes)
