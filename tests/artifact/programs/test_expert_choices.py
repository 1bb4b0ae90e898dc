"""Choices of experts in an artifact are read, or refused with one error; owners of experts are balanced."""

import itertools
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ingot.artifact import Artifact, open_artifact
from ingot.artifact.programs.expert_choices import (
    EXPERTS_FILE,
    MOST_REACHED,
    ExpertChoices,
    LayerChoices,
    balanced_owners,
    reached,
    read_expert_choices,
    read_expert_shares,
)
from ingot.errors import ArtifactError
from tests.artifact.tiny_artifact import reseal
from tests.conftest import BuildArtifact
from tests.each_case import each_case
from tests.parity import CHECKPOINTS

Json = dict[str, Any]
LAYER = {
    "chosen": 3,
    "counts": [9, 6, 9, 3, 3, 0],
    "consecutive": [3.0, 4.5, 5],
    "concurrent": [3.0, 5, 5.5, 5.25],
}
FIRST = "layers.0.mlp.combine"


@pytest.fixture(scope="module")
def artifact(build_unmeasured: BuildArtifact) -> Artifact:
    return build_unmeasured("fp32-cpu", CHECKPOINTS / "qwen3_moe", "cpu.engine=native")


def as_json(artifact: Artifact) -> Json:
    program = json.loads(artifact.file("program/operations.json").read_text())
    layers = [one["node"] for one in program["operations"] if one["kind"] == "experts"]
    return {"text": "t.txt", "sha256": "0" * 64, "tokens": 10, "layers": {node: dict(LAYER) for node in layers}}


def with_choices(artifact: Artifact, folder: Path, raw: Json) -> Artifact:
    """Copy an artifact with this program/experts.json, sealed well."""
    copy = shutil.copytree(artifact.path, folder)
    (copy / EXPERTS_FILE).write_text(json.dumps(raw))
    reseal(copy, lambda manifest: manifest["files"].update({EXPERTS_FILE: {"bytes": 0, "sha256": "0" * 64}}))
    reseal(copy)
    return open_artifact(copy)


def test_shares_of_an_artifact_add_up_to_one(artifact: Artifact, tmp_path: Path) -> None:
    raw = as_json(artifact)
    shares = read_expert_shares(with_choices(artifact, tmp_path / "a", raw))
    assert shares == dict.fromkeys(raw["layers"], (0.3, 0.2, 0.3, 0.1, 0.1, 0.0))


def test_an_artifact_without_measured_experts_has_no_shares(artifact: Artifact) -> None:
    assert read_expert_choices(artifact) is None
    assert read_expert_shares(artifact) == {}


CASES: dict[str, tuple[Callable[[Json, Json], object], str]] = {
    "negative": (lambda raw, own: own.update(counts=[-1, 10, 9, 6, 3, 3]), "counts.0: Input should be greater than or"),
    "huge": (lambda raw, own: own.update(counts=[10**30] * 6), "counts.0: "),
    "one more": (lambda raw, own: own.update(counts=[9, 6, 9, 3, 3, 1]), "add up to 31; they must be 3 for each of 10"),
    "all to one": (lambda raw, own: own.update(counts=[30] + [0] * 5), "an expert of the layer .* has 30 of 10 tokens"),
    "an expert less": (
        lambda raw, own: own.update(counts=[9, 6, 9, 3, 3], concurrent=[3.0]),
        r"chooses 3 of 5 experts, in program/operations\.json 3 of 6",
    ),
    "other choice": (
        lambda raw, own: own.update(chosen=1, counts=[6, 4, 0, 0, 0, 0], consecutive=[1.0], concurrent=[1.0]),
        "chooses 1 of 6 experts, in",
    ),
    "no chosen": (lambda raw, own: own.update(chosen=0), "chosen: Input should be greater than or equal to 1"),
    "more chosen than experts": (lambda raw, own: own.update(chosen=9), "chooses 9 of 6 experts"),
    "few distinct": (lambda raw, own: own.update(concurrent=[3.0, 2.9]), "2 tokens of the layer .* reach 2.9 experts"),
    "many distinct": (lambda raw, own: own.update(consecutive=[3.1]), "reach 3.1 experts; they must be 3 to 3"),
    "all distinct": (lambda raw, own: own.update(concurrent=[3, 4, 6.5]), "4 tokens .* they must be 3 to 6"),
    "no distinct": (lambda raw, own: own.update(consecutive=[]), "consecutive: Tuple should have at least 1 item"),
    "longer": (lambda raw, own: own.update(concurrent=[3.0] * 7), "concurrent: Tuple should have at most 6 items"),
    "another layer": (lambda raw, own: raw["layers"].update(x=raw["layers"].pop(FIRST)), "is in one of them alone"),
    "a layer more": (lambda raw, own: raw["layers"].update(x=own), "'x' is in one of them alone"),
    "no layers": (lambda raw, own: raw["layers"].clear(), "layers: Dictionary should have at least 1 item"),
    "no tokens": (lambda raw, own: raw.update(tokens=0), "tokens: Input should be greater than or equal to 1"),
    "digest": (lambda raw, own: raw.update(sha256="x"), "sha256: String should match"),
    "key": (lambda raw, own: own.update(more=1), "more: Extra inputs are not permitted"),
}


@each_case("case", CASES)
def test_choices_that_do_not_fit_the_program_are_refused(artifact: Artifact, tmp_path: Path, case: str) -> None:
    change, message = CASES[case]
    raw = as_json(artifact)
    change(raw, raw["layers"][FIRST])
    with pytest.raises(ArtifactError, match=message) as caught:
        read_expert_shares(with_choices(artifact, tmp_path / "a", raw))
    assert EXPERTS_FILE in str(caught.value)


def test_the_busiest_quarter_of_five_experts_is_two() -> None:
    layer = LayerChoices(chosen=1, counts=(1, 0, 5, 2, 2), consecutive=(1.0,), concurrent=(1.0,))
    assert layer.busiest_quarter == 0.7


def test_rows_reach_no_fewer_experts_than_one_row_less_and_all_of_them_at_most() -> None:
    layer = LayerChoices(chosen=2, counts=(5, 5), consecutive=(2.0,), concurrent=(2.0,))
    assert layer.reach == ((1, MOST_REACHED),)
    assert reached(layer.reach, 5) == pytest.approx(1)
    other = LayerChoices(chosen=1, counts=(5, 2, 2, 1), consecutive=(1.0,), concurrent=(1.0, 1.6, 1.5, 3.0))
    assert other.reach == ((1, 1 / 4), (2, 1.6 / 4), (4, 1.6 / 4), (8, 3 / 4))
    choices = ExpertChoices(text="t", sha256="0" * 64, tokens=10, layers={"a": other, "b": other, "c": layer})
    ((rows, share),) = choices.reach
    assert rows == 1
    assert share == pytest.approx((1 / 4 + 1 / 4 + 1) / 3)


# Owners


def sums_of(shares: Sequence[float], owners: Sequence[int], count: int) -> list[float]:
    return [sum(share for share, own in zip(shares, owners, strict=True) if own == owner) for owner in range(count)]


def best_sum(shares: Sequence[float], count: int) -> float:
    """The smallest largest sum, by trying every division into equal numbers of experts."""
    least, larger = divmod(len(shares), count)
    sizes = sorted([least + 1] * larger + [least] * (count - larger))
    divisions = (
        owners
        for owners in itertools.product(range(count), repeat=len(shares))
        if sorted(owners.count(owner) for owner in range(count)) == sizes
    )
    return min(max(sums_of(shares, owners, count)) for owners in divisions)


def skewed(random_: random.Random, number: int) -> list[float]:
    weights = [random_.random() ** random_.choice([1, 3, 9]) for _ in range(number)]
    return [weight / sum(weights) for weight in weights]


@each_case(("number", "count"), [(1, 1), (3, 5), (6, 2), (7, 2), (6, 3), (8, 3), (7, 4)])
def test_owners_are_within_the_bound_of_the_best_division(number: int, count: int) -> None:
    for seed in range(12):
        shares = skewed(random.Random(seed), number)
        owners = balanced_owners(shares, count)
        largest, best, mean = max(sums_of(shares, owners, count)), best_sum(shares, count), 1 / count
        assert best - 1e-12 <= largest <= min(2 * best, mean + max(mean, *shares, 0)) + 1e-12


@each_case(("number", "count"), [(0, 3), (2, 5), (8, 4), (9, 4), (127, 8), (128, 8)])
def test_owners_have_equal_numbers_of_experts(number: int, count: int) -> None:
    owners = balanced_owners(skewed(random.Random(0), number), count)
    sizes = [owners.count(owner) for owner in range(count)]
    assert sum(sizes) == len(owners) == number
    assert set(sizes) <= {number // count, number // count + 1}


def test_owners_of_known_shares() -> None:
    assert balanced_owners([0.1, 0.4, 0.2, 0.3], 2) == [0, 0, 1, 1]
    # The first owner fills up with small experts that the second could not take.
    assert balanced_owners([0.7, 0.1, 0.1, 0.1], 2) == [0, 1, 1, 0]
    assert balanced_owners([0.25] * 4, 2) == [0, 1, 0, 1]


@each_case(("shares", "count", "message"), [([0.5, 0.5], 0, "count is 0"), ([-0.1], 1, "numbers from 0")])
def test_owners_of_impossible_shares_are_refused(shares: list[float], count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balanced_owners(shares, count)
