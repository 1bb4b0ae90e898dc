"""The matrix passes on correct engines, names the pair where an answer differs, and fails what it did not exercise."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.errors import GateFailed, GateUndecided, UsageError
from ingot.runtime.forward_batch import FloatArray, ForwardBatch
from ingot.runtime.kv.blocks import BlockManager, BlockMove, Copy, TokenArray
from ingot.runtime.kv.keys import BlockContent
from ingot.runtime.steps.step_loop import StepLoop
from ingot.validation.verify import FEATURES, VerifyOptions, cell_names, open_subject, verify
from ingot.validation.verify import matrix as matrix_module
from ingot.validation.verify.result import VerifyResult, raise_for_cells
from tests.conftest import BuildArtifact
from tests.simulators.fake_executor import FakeExecutor
from tests.validation.verify.subjects import fake_subject

REAL = ("chunked-prefill+batch-mates", "prefix-hit+swap", "host-restore+disk-restore", "preemption+lookup")


def test_cells_are_every_feature_every_pair_and_triples_with_speculation() -> None:
    names = cell_names(FEATURES.values(), quick=False)
    assert len(set(names)) == len(names)
    pairs = [name for name in names if len(name) == 2]
    assert pairs == list(combinations(FEATURES, 2))
    assert all(any(FEATURES[name].speculates for name in cell) for cell in names if len(cell) == 3)
    assert [cell for cell in cell_names(FEATURES.values(), quick=True) if len(cell) == 3] == []


ENGINES: dict[str, dict[str, Any]] = {
    "uniform layers": {},
    "asynchronous device": {"pipelined": True},
    "side state": {"layout": "side state"},
    "layers of every kind": {"layout": "all"},
}


def cells_of(engine: str) -> tuple[str, ...]:
    """A quarter of the pairs: together, the engines verify each. The first two also share every third triple."""
    names = cell_names(FEATURES.values(), quick=False)
    pairs, triples = ([cell for cell in names if len(cell) == count] for count in (2, 3))
    number = list(ENGINES).index(engine)
    chosen = [*pairs[number :: len(ENGINES)], *(triples[::3][number::2] if number < 2 else ())]
    return tuple("+".join(cell) for cell in chosen)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_correct_engine_passes(tmp_path: Path, engine: str) -> None:
    cells = cells_of(engine)
    options = VerifyOptions(quick=engine != "uniform layers", only=cells)
    result = verify(fake_subject(tmp_path, **ENGINES[engine]), options)
    assert {cell.name: cell.differences or cell.exercised for cell in result.failures} == {}
    reasons = {cell.reason for cell in result.cells if cell.reason and "constraint" not in cell.features}
    pairs = combinations(("lookup", "suffix", "mtp", "draft", "combined"), 2)
    assert reasons <= {"mtp: the artifact has no MTP layer"} | {f"an engine has {a} or {b}, not both" for a, b in pairs}
    assert result.verdict == "PASS"
    assert result.num_checked == len(cells) - result.count("N/A")
    raise_for_cells(result)


def verdicts_with_side_state(folder: Path, cells: tuple[str, ...]) -> list[str]:
    """The verdicts on an engine with layers of every kind and a device that computes meanwhile."""
    subject = fake_subject(folder, pipelined=True, layout="all")
    result = verify(subject, VerifyOptions(quick=True, only=cells, seed=1))
    return [f"{cell.name} {cell.verdict}" for cell in result.cells]


def test_side_state_passes_a_cell_of_the_tiers_and_one_of_drafts(tmp_path: Path) -> None:
    cells = ("host-restore+failed-transfers", "preemption+draft")
    assert verdicts_with_side_state(tmp_path, cells) == [f"{cell} OK" for cell in cells]


# A proof: see .ci/proofs.toml.
def test_side_state_passes_the_cells_of_the_tiers_and_of_drafts(tmp_path: Path) -> None:
    cells = (
        "prefix-hit+swap",
        "failed-transfers",
        "host-restore+disk-restore",
        "chunked-prefill+host-restore",
        "host-restore+lookup",
        "failed-transfers+draft",
        "preemption+combined",
    )
    assert verdicts_with_side_state(tmp_path, cells) == [f"{cell} OK" for cell in cells]


def test_a_wrong_prefix_hit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = BlockManager._contents

    def without_history(
        self: BlockManager, root: bytes, hashes: list[bytes], tokens: TokenArray, end: int
    ) -> Iterator[BlockContent]:
        for index in range(len(hashes), end):
            yield next(right(self, root, [root] * index, tokens, index + 1))

    monkeypatch.setattr(BlockManager, "_contents", without_history)
    pairs = ("prefix-hit+chunked-prefill", "prefix-hit+batch-mates")
    result = verify(fake_subject(tmp_path), VerifyOptions(quick=True, only=pairs))
    found = [cell for cell in result.cells if cell.verdict == "DIFFERS"]
    assert {cell.name for cell in found} == {*pairs}
    with pytest.raises(GateFailed, match=r"prefix-hit\+.* DIFFERS: .*repeat it with `ingot verify ARTIFACT --quick"):
        raise_for_cells(result)


SLOW = ("slow-part", "slow-part+prefix-hit", "slow-part+batch-mates")


def test_blocks_that_are_read_from_the_wrong_part_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = FakeExecutor.logits

    def from_the_wrong_part(self: FakeExecutor, batch: ForwardBatch) -> FloatArray:
        tables = batch.block_tables
        wrong = np.where(tables >= self.num_fast_blocks, tables % self.num_fast_blocks, tables)
        return right(self, replace(batch, block_tables=wrong))

    monkeypatch.setattr(FakeExecutor, "logits", from_the_wrong_part)
    result = verify(fake_subject(tmp_path), VerifyOptions(quick=True, only=SLOW))
    assert [cell.verdict for cell in result.cells] == ["DIFFERS"] * len(SLOW)


def test_a_block_that_is_read_before_it_arrived_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, late = StepLoop._make_copies, list[Copy]()

    def one_step_later(self: StepLoop, copies: Iterable[Copy]) -> None:
        moves = [copy for copy in copies if isinstance(copy, BlockMove)]
        right(self, [*late, *(copy for copy in copies if not isinstance(copy, BlockMove))])
        late[:] = moves

    monkeypatch.setattr(StepLoop, "_make_copies", one_step_later)
    result = verify(fake_subject(tmp_path), VerifyOptions(quick=True, only=SLOW))
    assert "DIFFERS" in [cell.verdict for cell in result.cells]


def test_a_run_that_is_not_what_it_should_verify_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = {**FEATURES, "preemption": replace(FEATURES["preemption"], change=lambda plan, _: plan)}
    monkeypatch.setattr(matrix_module, "FEATURES", never)
    result = verify(fake_subject(tmp_path), VerifyOptions(only=("preemption", "preemption+prefix-hit")))
    assert [cell.verdict for cell in result.cells] == ["NOT EXERCISED", "NOT EXERCISED"]
    assert result.verdict == "UNDECIDED"
    with pytest.raises(GateUndecided, match="the run did not exercise preemption"):
        raise_for_cells(result)


def test_an_engine_that_raises_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaking(self: BlockManager, sequence_id: int) -> None:
        self.tables.pop(sequence_id)

    subject = fake_subject(tmp_path)
    expected, source = matrix_module.plain_answers(subject, VerifyOptions(quick=True))
    monkeypatch.setattr(matrix_module, "plain_answers", lambda *_: (expected, source))
    monkeypatch.setattr(BlockManager, "release", leaking)
    result = verify(subject, VerifyOptions(quick=True, only=("batch-mates",)))
    assert result.verdict == "FAIL"


def test_a_feature_that_a_subject_does_not_have_is_named_with_its_reason(tmp_path: Path) -> None:
    subject = fake_subject(tmp_path, block_tokens=64, context_tokens=128)
    result = verify(subject, VerifyOptions(quick=True, only=("prefix-hit", "batch-mates")))
    assert [cell.verdict for cell in result.cells] == ["N/A", "OK"]
    assert result.cells[0].reason == (
        "prefix-hit: blocks have 64 tokens and the context 128; at least 12 blocks are needed"
    )


def test_without_a_draft_artifact_its_cells_say_what_to_give(tmp_path: Path) -> None:
    subject = replace(fake_subject(tmp_path), draft=None)
    result = verify(subject, VerifyOptions(quick=True, only=("draft", "prefix-hit+draft")))
    assert {cell.reason for cell in result.cells} == {"draft: no draft artifact was given; name one with --draft"}
    both = verify(fake_subject(tmp_path), VerifyOptions(quick=True, only=("lookup+draft",)))
    assert both.cells[0].reason == "an engine has lookup or draft, not both"


def test_an_unknown_pair_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown feature 'prefix-hits'.*'prefix-hit'"):
        verify(fake_subject(tmp_path), VerifyOptions(only=("prefix-hits+batch-mates",)))


def test_the_result_is_the_same_after_json(tmp_path: Path) -> None:
    result = verify(fake_subject(tmp_path), VerifyOptions(quick=True, only=("batch-mates",)))
    assert VerifyResult.model_validate_json(result.as_json()) == result


@pytest.mark.parametrize("recipe", ["int4-cpu"])
def test_the_cpu_engine_passes_on_real_weights(build_unmeasured: BuildArtifact, two_layers: Path, recipe: str) -> None:
    result = verify(open_subject(build_unmeasured(recipe, two_layers)), VerifyOptions(quick=True, only=REAL, seed=3))
    assert result.failures == ()
    assert result.logits == "bit-equal"
    assert result.requests["large"][0] > 512, "longer than attention's split and than a step"


def test_one_wrong_bit_of_one_logit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = FakeExecutor.logits

    def wrong(self: FakeExecutor, batch: ForwardBatch) -> FloatArray:
        logits = right(self, batch)
        if len(batch.context_lens) > 1:
            logits[0, 5] = np.nextafter(logits[0, 5], np.float32(-100))
        return logits

    monkeypatch.setattr(FakeExecutor, "logits", wrong)
    result = verify(fake_subject(tmp_path), VerifyOptions(quick=True, only=("batch-mates", "chunked-prefill")))
    assert [cell.verdict for cell in result.cells] == ["DIFFERS", "OK"]
    assert "logits differ at output token" in result.cells[0].differences[0]
