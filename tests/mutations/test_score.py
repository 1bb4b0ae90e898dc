"""`ingot verify` finds every planted fault, each by one of its pairs; without faults it finds nothing."""

from importlib.util import find_spec
from pathlib import Path

from ingot.runtime.cpu.native_executor import NativeExecutor
from ingot.validation.verify import FEATURES, VerifyOptions, open_subject, verify
from tests.conftest import BuildArtifact
from tests.each_case import each_case
from tests.mutations.faults import FAULTS, Fault
from tests.mutations.score import score, subject_for
from tests.simulators.layered_executor import VARIANTS
from tests.validation.verify.subjects import fake_subject

SIMULATED = [fault for fault in FAULTS if not fault.needs_model]
# Faults of constraints need the extra `structured`.
PLANTED = [fault for fault in SIMULATED if "constraint" not in fault.features or find_spec("llguidance")]
# What differs between clean runs: the pair, the model, the trouble. Faults that share them share the run.
CLEAN = list({(fault.pair, fault.layout, fault.trouble): fault for fault in PLANTED}.values())
CELLS = ("prefix-hit+chunked-prefill", "batch-mates+preemption", "prefix-hit+minimal-pool")


@each_case("fault", PLANTED, ids=lambda fault: f"{fault.number} {fault.planted}")
def test_a_planted_fault_is_found_by_a_pair_with_its_feature(fault: Fault, tmp_path: Path) -> None:
    assert set(fault.features) <= set(FEATURES)
    found = score(fault, *subject_for(fault, tmp_path), only=(fault.pair,))
    assert found.is_named, list(found.result.cells)


@each_case("fault", CLEAN, ids=lambda fault: f"{fault.number} {fault.planted}")
def test_the_same_pair_passes_without_the_fault(fault: Fault, tmp_path: Path) -> None:
    subject, executor = subject_for(fault, tmp_path)
    with fault.trouble(executor):
        result = verify(subject, VerifyOptions(quick=True, only=(fault.pair,)))
    assert result.verdict == "PASS", list(result.cells)


@each_case("pipelined", [False, True])
@each_case("layout", VARIANTS)
def test_models_of_every_layout_pass(layout: str, pipelined: bool, tmp_path: Path) -> None:
    subject = fake_subject(tmp_path, layout=layout, pipelined=pipelined)
    result = verify(subject, VerifyOptions(quick=True, only=CELLS))
    assert result.failures == ()
    assert result.num_checked == len(CELLS)


def test_a_draft_after_the_end_of_an_answer_is_found_on_a_real_model(build_unmeasured: BuildArtifact) -> None:
    """Its drafts are real too: an answer has to end where prompt lookup finds some."""
    [fault] = [
        one
        for one in FAULTS
        if one.planted == "an answer that ends among accepted drafts keeps the draft after its end"
    ]
    found = score(fault, open_subject(build_unmeasured("int4-cpu")), NativeExecutor, only=("lookup",))
    [difference] = [text for cell in found.result.cells for text in cell.differences]
    assert "stop-draft" in difference


def test_a_clean_run_with_another_seed_raises_no_alarm(tmp_path: Path) -> None:
    assert verify(fake_subject(tmp_path), VerifyOptions(quick=True, seed=1)).failures == ()
