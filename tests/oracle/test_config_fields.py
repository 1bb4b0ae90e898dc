"""Each field of each family's config.json, changed alone: Ingot follows transformers or refuses the file.

A field that transformers reads and an importer ignores gives a model that runs and answers wrongly. So every field of
the configuration's class takes other values in the tiny checkpoint's config.json. Where transformers still loads the
weights and its logits are others than before, Ingot's are those, or it raises an IngotError; where the weights no
longer suffice, Ingot refuses them too.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.errors import IngotError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.config.decoder import read_config
from ingot.pipeline.model.importer import import_checkpoint
from tests.oracle.all_cases import ALL_CASES
from tests.oracle.cases import Case
from tests.parity import CHECKPOINTS, runner_of

torch: Any = pytest.importorskip("torch", reason="the oracle needs torch")
fixtures: Any = pytest.importorskip("tests.oracle.make_fixtures", reason="the oracle needs transformers")

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

_TOKENS = [[5, 17, 99, 42, 8, 61, 23, 77, 31, 12, 4, 90]]
# Fields of every configuration that no forward of a text model reads.
_UNREAD = {
    *("_name_or_path", "architectures", "bad_words_ids", "chunk_size_feed_forward", "dtype", "id2label", "label2id"),
    *("model_type", "output_attentions", "output_hidden_states", "problem_type", "return_dict", "torch_dtype"),
    *("transformers_version", "use_cache", "is_encoder_decoder", "quantization_config", "per_layer_config"),
    *("base_model_tp_plan", "base_model_pp_plan", "base_model_ep_plan", "base_model_fsdp_plan"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id"),
}
# What a field may be, next to numbers and switches.
_TEXTS = {"act": ("relu", "silu"), "position": ("rope", "nope", "alibi"), "rope_type": ("linear",)}
# Of the largest logit: far above rounding in float32.
_SMALLEST_CHANGE = 1e-4


def _one_case_of_each_family() -> list[Case]:
    known = [case for case in reversed(ALL_CASES) if case.model_type not in fixtures.EXTENDED]
    return list({case.model_type: case for case in known}.values())[::-1]


def _others(key: str, value: Any) -> Iterator[Any]:
    """Yield other values of a field."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value * 2) if value else (1, 2)
        if value > 1:
            yield value // 2
            if key != "head_dim":  # one dim has no pair to rotate, and transformers broadcasts what it has
                yield 1
    elif isinstance(value, float):
        yield from (value * 1.5 + 0.25, 0.5)
    elif value is None:
        yield from (0.5, 2, True)
    elif isinstance(value, str):
        yield from (text for part, texts in _TEXTS.items() if part in key for text in texts if text != value)
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from ({**value, name: other} for other in _others(name, inner))
    elif isinstance(value, list) and value:
        yield value[::-1]
        yield from ([other] * len(value) for other in sorted(set(map(str, value))) if isinstance(value[0], str))
        yield from ([other] * len(value) for other in _others(key, value[0]) if not isinstance(value[0], str))


def _fields_of(folder: Path) -> dict[str, Any]:
    """The configuration's fields and their values: transformers' own, and those of the file."""
    config = fixtures.transformers.AutoConfig.from_pretrained(folder)
    fields = {**config.to_dict(), **json.loads((folder / "config.json").read_text())}
    return {key: value for key, value in fields.items() if key not in _UNREAD and not key.startswith("_attn")}


def _expected(folder: Path) -> Any:
    """Logits of transformers; "refused" where it raises, "missing" where weights do not suffice."""
    how = {"attn_implementation": "eager", "experts_implementation": "eager", "output_loading_info": True}
    try:
        model, facts = fixtures.model_of(folder, dtype=torch.float32, **how)
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor(_TOKENS)).logits[0].float().numpy()
    # A configuration class or a model may raise anything at a value that it cannot compute.
    except Exception:  # noqa: BLE001
        return "refused"
    return "missing" if facts["missing_keys"] or facts["mismatched_keys"] else logits


def _found(folder: Path) -> Any:
    """Logits of Ingot; "refused" where it raises, as an engine does at a prompt above the longest context."""
    checkpoint = Checkpoint.open(folder)
    try:
        if read_config(checkpoint).max_positions < len(_TOKENS[0]):
            return "refused"
        return runner_of(import_checkpoint(checkpoint)).run_ragged(_TOKENS)[0]
    except IngotError:
        return "refused"


def _difference(first: Any, second: Any) -> float:
    if first.shape != second.shape or not np.isfinite(first).all():
        return np.inf
    return float(np.abs(first - second).max() / np.abs(second).max())


def changed_fields(case: Case, folder: Path) -> list[str]:
    """Return each change of a field that transformers follows and Ingot does not."""
    shutil.copytree(CHECKPOINTS / case.name, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    before, ignored = _expected(folder), []
    for key, value in _fields_of(folder).items():
        for other in _others(key, value):
            file.write_text(json.dumps({**config, key: other}))
            expected = _expected(folder)
            if isinstance(expected, str) and expected == "refused":
                continue
            if isinstance(found := _found(folder), str):
                continue
            change = f"{case.name}: {key} {value!r} -> {other!r}"
            if isinstance(expected, str):
                ignored.append(f"{change}: transformers lacks weights")
            elif (difference := _difference(found, expected)) > _SMALLEST_CHANGE:
                moved = _difference(expected, before)
                ignored.append(f"{change}: logits differ by {difference:.2g}, transformers' own moved by {moved:.2g}")
    return ignored


@pytest.mark.parametrize("case", _one_case_of_each_family(), ids=lambda case: case.name)
def test_a_changed_field_is_followed_or_refused(case: Case, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    assert changed_fields(case, tmp_path / case.name) == []
