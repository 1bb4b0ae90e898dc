"""Every pair of values of two fields of config.json, in every family of pairwise_cases.py: logits of transformers.

These are computed in float64: in float32 transformers' own are up to 8e-6 off, where a norm multiplies by 2.
"""

from pathlib import Path
from typing import Any

import pytest

from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import read_config
from ingot.pipeline.model.importer import import_checkpoint
from tests.oracle.dense_cases import DENSE_CASES
from tests.oracle.hybrid_cases import HYBRID_CASES
from tests.oracle.latent_cases import LATENT_CASES
from tests.oracle.moe_cases import MOE_CASES
from tests.oracle.pairwise_cases import FIELDS, pairs_in, pairs_of_all, pairwise_cases, pairwise_rows
from tests.oracle.unequal_cases import UNEQUAL_CASES
from tests.parity import compare, runner_of


@pytest.mark.parametrize("model_type", FIELDS)
def test_the_rows_cover_every_pair(model_type: str) -> None:
    fields = FIELDS[model_type]
    rows = pairwise_rows(fields)
    assert {pair for row in rows for pair in pairs_in(row, fields)} == set(pairs_of_all(fields))


def test_every_family_without_random_configurations_has_fields() -> None:
    cases = [*DENSE_CASES, *MOE_CASES, *LATENT_CASES, *HYBRID_CASES, *UNEQUAL_CASES]
    assert {case.model_type for case in cases} == FIELDS.keys()


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", FIELDS)
def test_every_configuration_has_the_logits_of_transformers(model_type: str, tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch", reason="the oracle needs torch")
    fixtures: Any = pytest.importorskip("tests.oracle.make_fixtures")
    torch.set_num_threads(1)
    for case in pairwise_cases(model_type):
        folder = tmp_path / case.name
        fixtures.make_checkpoint(case, folder)
        tokens = fixtures.make_tokens(case)
        found = runner_of(import_checkpoint(Checkpoint.open(folder))).run_ragged(tokens)
        dtype = torch.float32 if model_type == "xglm" else torch.float64  # its mask does not fit float64
        parity = compare(found, fixtures.reference_logits(folder, tokens, dtype))
        config = read_config(Checkpoint.open(folder))
        # Norms whose weights are about 1, with 1 added, enlarge what follows; so do scores that nothing scales down.
        is_unscaled = config.family.scale_key == "one" and config.family.qk_norm == "none"
        gain = 2 if config.family.norm_adds_one or is_unscaled else 1
        assert parity.worst <= gain * parity.limit, case
