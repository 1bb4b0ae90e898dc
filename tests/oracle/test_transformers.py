"""Against transformers itself: fixtures made afresh, logits, rope tables and the defaults in the families' table."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import read_config
from ingot.pipeline.checkpoint.families import FAMILIES
from ingot.pipeline.checkpoint.families.hybrids import HYBRIDS
from ingot.pipeline.checkpoint.families.rms_norm import UNEQUAL
from ingot.pipeline.checkpoint.families.table import TOWERS
from ingot.pipeline.model.importer import import_checkpoint
from ingot.pipeline.model.rope import attention_factor, inverse_frequencies
from tests.each_case import each_case
from tests.oracle.all_cases import ALL_CASES
from tests.oracle.cases import CASES, Case
from tests.oracle.hybrid_cases import HYBRID_CASES
from tests.oracle.pairwise_cases import FIELDS
from tests.oracle.random_cases import random_case
from tests.parity import CHECKPOINTS, LOGIT_TOLERANCE, LOGITS, compare, load_logits, runner_of
from tests.reference_runner import ReferenceRunner

torch: Any = pytest.importorskip("torch", reason="the oracle needs torch")
transformers: Any = pytest.importorskip("transformers", reason="the oracle needs transformers")
fixtures: Any = pytest.importorskip("tests.oracle.make_fixtures")
make_defaults: Any = pytest.importorskip("tests.oracle.make_defaults")

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@each_case("case", ALL_CASES, ids=lambda case: case.name)
def test_a_fresh_checkpoint_has_the_fixtures_bytes_and_logits(case: Case, tmp_path: Path) -> None:
    fixtures.make_checkpoint(case, tmp_path)
    tokens, committed = load_logits(CHECKPOINTS / case.name / LOGITS)
    assert fixtures.make_tokens(case) == tokens
    assert Checkpoint.open(tmp_path).digest == Checkpoint.open(CHECKPOINTS / case.name).digest
    fresh = fixtures.reference_logits(tmp_path, tokens)
    parity = compare(fresh, committed)
    assert parity.worst <= parity.limit
    ours = runner_of(import_checkpoint(Checkpoint.open(tmp_path), case.context_tokens)).run_ragged(tokens)
    assert compare(ours, fresh).worst <= parity.limit


@each_case("seed", [1])
@each_case("case", ALL_CASES, ids=lambda case: case.name)
def test_other_prompts_agree_too(case: Case, seed: int) -> None:
    """The same checkpoints, other tokens, another order of blocks and chunks of other sizes.

    Of hybrids the reference has 64 bits: transformers' own delta rule in 32 is up to 9e-6 from it.
    """
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(3, case.full_config["vocab_size"], length).tolist() for length in case.lengths]
    schedule = [rng.integers(1, 12, 3).tolist() for _ in range(8)]
    dtype = torch.float64 if case in HYBRID_CASES else torch.float32
    expected = fixtures.reference_logits(CHECKPOINTS / case.name, tokens, dtype)
    model = import_checkpoint(Checkpoint.open(CHECKPOINTS / case.name), case.context_tokens)
    parity = compare(runner_of(model, seed).run_ragged(tokens, schedule), expected)
    assert parity.worst <= parity.limit


@each_case("seed", range(6))
@each_case(
    "model_type", [name for name in FAMILIES if name not in FIELDS and name not in (*TOWERS, *HYBRIDS, *UNEQUAL)]
)
def test_random_configurations_agree(model_type: str, seed: int, tmp_path: Path) -> None:
    """Families of FIELDS have configurations in test_pairwise.py, TOWERS in test_text_towers.py, HYBRIDS cases."""
    case = random_case(model_type, seed)
    fixtures.make_checkpoint(case, tmp_path)
    tokens = fixtures.make_tokens(case)
    model = import_checkpoint(Checkpoint.open(tmp_path), case.context_tokens)
    parity = compare(ReferenceRunner(model, seed=seed).run_ragged(tokens), fixtures.reference_logits(tmp_path, tokens))
    assert parity.worst <= parity.limit, case


def test_the_file_of_defaults_is_what_transformers_has() -> None:
    assert json.loads(make_defaults.FILE.read_text()) == make_defaults.all_defaults()


@each_case("model_type", FAMILIES)
def test_a_default_in_code_has_no_field_in_transformers(model_type: str) -> None:
    extended = make_defaults.EXTENDED.get(model_type, model_type)
    fields = transformers.AutoConfig.for_model(extended).__dataclass_fields__
    assert not FAMILIES[model_type].more_defaults.keys() & fields.keys()


@each_case("case", CASES, ids=lambda case: case.name)
def test_rope_frequencies_and_scales_are_those_of_transformers(case: Case) -> None:
    folder = CHECKPOINTS / case.name
    model = fixtures.model_of(folder).model
    config = read_config(Checkpoint.open(folder))
    context_tokens = config.default_context_tokens
    types = getattr(model.config, "layer_types", None) or ["full_attention"] * len(config.layers)
    for layer, layer_type in zip(config.layers, types, strict=True):
        if layer.rope is None:
            continue
        prefix = f"{layer_type}_" if config.family.rope_by_layer_type else ""
        theirs = getattr(model.rotary_emb, f"{prefix}inv_freq").numpy()
        scale = getattr(model.rotary_emb, f"{prefix}attention_scaling")
        np.testing.assert_allclose(inverse_frequencies(layer.rope, context_tokens), theirs, rtol=3e-7)
        assert attention_factor(layer.rope) == pytest.approx(scale, rel=1e-12)


def test_the_tolerance_is_far_from_what_a_wrong_dtype_gives() -> None:
    """Running transformers in the checkpoint's own 16 bits differs by a hundred times the tolerance."""
    folder = CHECKPOINTS / "llama-tied-biases"
    tokens, expected = load_logits(folder / LOGITS)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        rows = [model(input_ids=torch.tensor([prompt])).logits[0].float().numpy() for prompt in tokens]
    assert compare(rows, expected).worst > 100 * LOGIT_TOLERANCE
