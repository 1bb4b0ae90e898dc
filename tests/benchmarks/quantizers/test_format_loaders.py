"""A comparison counts tokens up to the first difference and takes the largest difference of all logits."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from benchmarks.adapters.loading import Loaded, Request, greedy, request_from_json
from benchmarks.paths import ROOT
from benchmarks.quantizers.format_loaders import CASES, Proof, Reference, compare

REFERENCE = Reference((1, 2), (3, 4, 5), np.array([[0.0, 1.0], [0.5, 0.0], [2.0, -3.0]], np.float32))
CASE = CASES[0]


def test_equal_tokens_are_counted_up_to_the_first_that_differs() -> None:
    proof = compare(CASE, REFERENCE, Loaded([3, 9, 5], {"package": "1"}), REFERENCE.logits)
    assert (proof.same_tokens, proof.new_tokens, proof.loader) == (1, 3, "package")
    assert proof.lead == 5.0  # of the two logits after the first token
    assert compare(CASE, REFERENCE, Loaded([3, 4, 5], {"package": "1"}), REFERENCE.logits).same_tokens == 3


def test_the_difference_is_the_largest_of_all_positions_beside_the_largest_logit() -> None:
    changed = REFERENCE.logits + np.array([[0.0, 0.5], [0.0, 0.0], [-0.25, 0.0]], np.float32)
    proof = compare(CASE, REFERENCE, Loaded([3, 4, 5], {"package": "1"}), changed)
    assert (proof.largest_difference, proof.largest_logit) == (0.5, 3.0)


def test_a_row_says_what_was_measured_or_why_nothing_was() -> None:
    proof = Proof("gptq", "4 bits", "package", 32, 32, 0.0625, 14.25)
    assert proof.line() == "| gptq | 4 bits | package | 32 of 32 | 0.062 | 14.2 |  |"
    assert replace(proof, failure="no").line() == "| gptq | 4 bits | package | no | | | |"


def test_the_loader_reads_the_very_request_that_the_parent_made(tmp_path: Path) -> None:
    request = Request(tmp_path, (1, 2), 3, (1, 2, 3), tmp_path / "logits.npy")
    assert request_from_json(json.dumps(asdict(request), default=str)) == request


def test_greedy_tokens_come_from_the_whole_text_before_them() -> None:
    seen: list[list[int]] = []

    def counting(ids: list[int]) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        seen.append(list(ids))
        return np.eye(10, dtype=np.float32)[[len(ids)]]  # the token is the text's length

    assert greedy(counting, [7, 8], 2) == [2, 3]
    assert seen == [[7, 8], [7, 8, 2]]


def test_every_loader_is_a_module_of_the_adapters() -> None:
    names = {loader for case in CASES for loader, _ in case.loaders}
    assert all((ROOT / "benchmarks" / "adapters" / f"{name}.py").is_file() for name in names)
