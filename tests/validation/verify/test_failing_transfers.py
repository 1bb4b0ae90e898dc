"""Late and failing transfers: what moves, what does not, and that an engine with them answers as it should."""

from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.validation.verify.failing_transfers import TransferFailures, make_transfers_fail
from tests.runtime.engines import token_engine
from tests.runtime.kv.tiered_engines import tiered_engine
from tests.simulators.fake_host_blocks import FakeStore

PARAMS = SamplingParams(max_tokens=3)


def test_every_third_restore_fails_and_the_answer_is_the_same() -> None:
    prompt, failures = list(range(22)), TransferFailures()
    with token_engine() as plain, tiered_engine(num_blocks=12) as engine:
        expected = plain.generate(prompt, PARAMS).token_ids
        make_transfers_fail(engine, failures)
        for start in (0, 100, 0, 150, 0):
            found = engine.generate([start + number for number in range(22)], PARAMS)
            assert start or found.token_ids == expected
            assert engine.flush_kv()
            engine.generate([200 - start + number % 50 for number in range(45)], PARAMS)
        engine.check()
        metrics = engine.metrics().kv_tiers
        assert metrics is not None
        assert metrics.restored_blocks > 0
        assert failures.failed["restore"] == failures.made["restore"] // 3 > 0
        assert failures.failed["save"] == failures.made["save"] // 5 > 0


def test_failures_can_be_rarer() -> None:
    often, seldom = TransferFailures(), TransferFailures(rarity=7)
    assert [often.next_fails("restore") for _ in range(6)] == [False, False, True] * 2
    assert [number for number in range(1, 43) if seldom.next_fails("restore")] == [21, 42]
    assert [number for number in range(1, 43) if seldom.next_fails("save")] == [35]


def test_some_blocks_reach_neither_the_disk_nor_come_back() -> None:
    prompt, store, failures = list(range(62)), FakeStore(), TransferFailures()
    for _ in range(4):
        with token_engine() as plain, tiered_engine(store=store) as engine:
            make_transfers_fail(engine, failures)
            assert engine.generate(prompt, PARAMS).token_ids == plain.generate(prompt, PARAMS).token_ids
            assert engine.flush_kv()
            engine.check()
    assert failures.failed["disk read"] > 0
    assert failures.failed["disk write"] > 0
    assert store.num_written < failures.made["disk write"]
