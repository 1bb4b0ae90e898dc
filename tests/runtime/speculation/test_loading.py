"""Speculation of real artifacts: equal tokens and logits, drafts that cannot draft, options that are refused."""

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ingot.artifact import Artifact
from ingot.errors import ArtifactError, UsageError
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.options import EngineOptions
from ingot.runtime.speculation.loading import require_draft
from ingot.runtime.speculation_options import SpeculationOptions
from tests.conftest import BuildArtifact
from tests.data_paths import DEMO_MODEL

PROMPTS = [
    "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n",
    "import os\nimport",
    "class A:\n    def __init__(self):",
]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def target(build_unmeasured: BuildArtifact) -> Artifact:
    return build_unmeasured("int4-cpu", DEMO_MODEL)


@pytest.fixture(scope="module")
def draft(build_unmeasured: BuildArtifact, two_layers: Path) -> Artifact:
    return build_unmeasured("fp32-cpu", two_layers)


@pytest.fixture(scope="module")
def plain(target: Artifact) -> Iterator[Engine]:
    with Engine.load(target, kv_blocks=64) as engine:
        yield engine


@pytest.mark.parametrize("drafter", ["lookup", "suffix", "draft", "auto+draft"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_tokens_are_those_of_plain_decoding_and_logits_bit_for_bit(
    target: Artifact, draft: Artifact, plain: Engine, drafter: str, adaptive: bool
) -> None:
    chosen = SpeculationOptions(drafter.replace("draft", str(draft.path)), adaptive=adaptive)
    params = [PARAMS, replace(PARAMS, temperature=0.8, seed=1), replace(PARAMS, repetition_penalty=1.2, logprobs=2)]
    with Engine.load(target, kv_blocks=64, speculation=chosen) as engine:
        for _ in range(2):  # the second time from cached blocks
            found = engine.generate(PROMPTS, params, keep_logits=True)
            expected = plain.generate(PROMPTS, params, keep_logits=True)
            for one, other in zip(found, expected, strict=True):
                assert (one.token_ids, one.text, one.logprobs) == (other.token_ids, other.text, other.logprobs)
                assert one.logits is not None
                assert other.logits is not None
                assert np.array_equal(one.logits, other.logits)
        metrics = engine.metrics().speculation
    assert metrics
    if not adaptive:
        assert metrics.num_accepted_tokens > 10


def test_what_one_request_got_is_drafted_for_the_next_of_its_tenant_alone(target: Artifact) -> None:
    chosen = SpeculationOptions("suffix", adaptive=False)

    def accepted(engine: Engine, salt: str = "") -> int:
        before = engine.metrics().speculation
        engine.generate(PROMPTS[2], PARAMS, options=RequestOptions(cache_salt=salt))
        after = engine.metrics().speculation
        assert before
        assert after
        return after.num_accepted_tokens - before.num_accepted_tokens

    with Engine.load(target, kv_blocks=64, speculation=chosen) as engine:
        first = accepted(engine)
        again = accepted(engine)
        assert again > first
        assert again >= PARAMS.max_tokens // 2
        assert accepted(engine, salt="other") == first


def test_a_draft_may_be_given_as_an_artifact_that_is_open(target: Artifact, draft: Artifact) -> None:
    assert SpeculationOptions(draft).draft is draft
    with Engine.load(target, kv_blocks=64, speculation=SpeculationOptions(draft, adaptive=False)) as engine:
        engine.generate(PROMPTS[0], PARAMS)
        metrics = engine.metrics().speculation
    assert metrics
    assert metrics.num_drafts > 0


def test_the_target_as_its_own_draft_is_accepted_everywhere(target: Artifact) -> None:
    chosen = SpeculationOptions(target.path, num_draft_tokens=4, adaptive=False)
    with Engine.load(target, kv_blocks=64, speculation=chosen) as engine:
        engine.generate(PROMPTS, replace(PARAMS, temperature=1.0, seed=5))
        metrics = engine.metrics().speculation
    assert metrics
    assert metrics.acceptance_rate == 1


def test_a_draft_with_another_tokenizer_is_refused_by_name(target: Artifact, draft: Artifact, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(draft.path, other)
    file = other / "tokenizer/tokenizer.json"
    document = json.loads(file.read_text())
    vocabulary = document["model"]["vocab"]
    first, second = list(vocabulary)[1000:1002]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(document))
    changed = Artifact(other, draft.manifest)
    with pytest.raises(UsageError, match="their tokenizers differ") as caught:
        require_draft(changed, target)
    assert str(other) in str(caught.value)
    assert str(target.path) in str(caught.value)
    require_draft(draft, target)


def test_a_draft_with_side_state_is_refused_by_name(target: Artifact, draft: Artifact) -> None:
    kv = draft.manifest.kv.model_copy(update={"state_bytes": 64})
    recurrent = Artifact(draft.path, draft.manifest.model_copy(update={"kv": kv}))
    with pytest.raises(UsageError, match=f"{draft.path} cannot draft: its model keeps side state"):
        require_draft(recurrent, target)


def test_the_drafts_pool_has_the_size_that_is_set(
    target: Artifact, draft: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    size = 5 * draft.manifest.kv.block_bytes
    with (
        caplog.at_level(logging.INFO),
        Engine.load(target, kv_blocks=64, speculation=SpeculationOptions(draft.path, draft_kv_bytes=size)),
    ):
        assert f"drafts come from {draft.path}, with 5 KV blocks" in caplog.text
    with pytest.raises(UsageError, match="draft_kv_bytes is 1; one KV block of the draft takes"):
        Engine.load(target, kv_blocks=64, speculation=SpeculationOptions(draft.path, draft_kv_bytes=1))


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        (
            5,
            'speculation is 5; it must be None, "lookup", "suffix", "mtp", "auto", the folder of a',
        ),
        ("", "drafter is ''; it must be"),
        ("+", r"drafter is '\+', which is neither a drafter nor a folder"),
        ("suffix+", r"drafter is 'suffix\+'; it must be"),
        ("sufix", "drafter is 'sufix', which is neither a drafter nor a folder. Did you mean 'suffix'"),
        ("lookup+sufix", "drafter is 'sufix', which is neither a drafter nor a folder. Did you mean 'suffix'"),
        ("nowhere", "nor a folder; drafters: auto, lookup, mtp, suffix"),
        ("\0" + "x" * 5000, "which is neither a drafter nor a folder"),
    ],
)
def test_other_values_are_refused(speculation: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EngineOptions(speculation=speculation)  # type: ignore[arg-type]


def test_several_drafters_are_joined_by_a_plus_which_a_folder_may_contain(tmp_path: Path, draft: Artifact) -> None:
    (tmp_path / "a+b").mkdir()
    folder = str(tmp_path / "a+b")
    for text in (f"suffix+{folder}", f"{folder}+suffix", f"lookup+{folder}+suffix"):
        found = SpeculationOptions(text)
        assert (found.draft, "suffix" in found.names) == (folder, True)
    assert SpeculationOptions(folder).draft == folder
    assert SpeculationOptions("auto+suffix+auto").names == {"auto", "suffix"}
    assert SpeculationOptions(("lookup", Path(folder))).draft == Path(folder)
    opened = SpeculationOptions(f"suffix+{folder}").with_draft(draft)
    assert opened.names == {"suffix"}
    assert opened.draft is draft
    with pytest.raises(UsageError, match=r"drafter names 2 draft artifacts, .* there may be one"):
        SpeculationOptions((folder, Path("other")))


def test_a_history_is_kept_between_engines_and_only_for_the_drafter_that_has_one(
    target: Artifact, tmp_path: Path
) -> None:
    chosen = SpeculationOptions("auto", adaptive=False, history_path=tmp_path / "kept")
    accepted = []
    for salt in ("", "", "other"):
        with Engine.load(target, kv_blocks=64, speculation=chosen) as engine:
            engine.generate(PROMPTS[2], PARAMS, options=RequestOptions(cache_salt=salt))
            metrics = engine.metrics().speculation
        assert metrics
        accepted.append(metrics.num_accepted_tokens_by_kind.get("suffix", 0))
    assert accepted[0] == accepted[2] == 0
    assert accepted[1] >= PARAMS.max_tokens // 2
    with pytest.raises(UsageError, match="history_path is 'x', and there is no history without suffix"):
        SpeculationOptions("lookup", history_path="x")
    with pytest.raises(UsageError, match="history_path is ''; it must be the path of a folder"):
        SpeculationOptions("suffix", history_path="")


def test_adaptive_is_true_or_false() -> None:
    with pytest.raises(UsageError, match="adaptive is 'x'; it must be True or False"):
        SpeculationOptions("lookup", adaptive="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 65, 1.5, True])
def test_a_number_of_drafts_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(UsageError, match=r"num_draft_tokens is .* it must be a whole number from 1 to 64"):
        SpeculationOptions("lookup", num_draft_tokens=count)


def test_a_folder_that_is_not_an_artifact_is_refused(target: Artifact, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=str(tmp_path)):
        Engine.load(target, speculation=tmp_path)
