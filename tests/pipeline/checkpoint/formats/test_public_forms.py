"""Each form of published checkpoints is read as its package means it, or refused by name with what to do.

INGOT_PUBLIC_FORMS is a folder of checkpoints that tests/oracle/make_public_forms.py wrote with the packages themselves.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ingot.errors import CheckpointError
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.checkpoint.formats.decoded import DecodedWeight
from ingot.pipeline.checkpoint.formats.gguf_blocks import BLOCK_TYPES, decode_rows
from ingot.pipeline.checkpoint.formats.quantized_folder import METHODS, OTHER_METHODS
from ingot.pipeline.checkpoint.gguf_file import OTHER_TYPES, PLAIN_TYPES
from ingot.pipeline.model.importer import import_checkpoint
from tests.data_paths import ROOT
from tests.each_case import each_case
from tests.pipeline.checkpoint.formats.public_forms import FORMS, NOT_READ, Form, table
from tests.pipeline.checkpoint.formats.tiny_model import edit_quantization, exported
from tests.pipeline.checkpoint.formats.whole_fixture import FIXTURES

MADE = os.environ.get("INGOT_PUBLIC_FORMS")
VERSIONS = {kind: version for form in FORMS for kind, version in form.kinds.items()}
GGUF_TYPES = "gguf-types"
KINDS = [kind for kind in VERSIONS if kind != GGUF_TYPES]
NOT_READ_KINDS = ("torchao-int8",)
REFUSED = [form for form in FORMS if form.settings is not None]
# What to do, in each refusal that a user can act on.
ADVICE = ("Ingot reads", "build from", "it must be", "of auto-round Ingot reads", "settings per layer are not read")


@each_case("form", REFUSED, ids=[form.name for form in REFUSED])
def test_a_form_that_is_not_read_is_refused_by_name_with_what_to_do(form: Form, tmp_path: Path) -> None:
    assert form.settings is not None
    folder = exported(tmp_path, "gptq")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": dict(form.settings)}))
    (folder / "quantize_config.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint(Checkpoint.open(folder))
    message = str(caught.value)
    assert form.message in message
    assert any(advice in message for advice in ADVICE), message


def test_names_of_other_methods_are_no_misspellings(tmp_path: Path) -> None:
    assert not OTHER_METHODS & METHODS.keys()
    folder = exported(tmp_path, "gptq")
    for name in sorted(OTHER_METHODS):
        edit_quantization(folder, {"quant_method": name})
        with pytest.raises(CheckpointError, match=f"quant_method is '{name}', {NOT_READ}. Ingot reads GGUF files and"):
            Checkpoint.open(folder)


def test_every_form_that_is_read_has_a_proof() -> None:
    for form in FORMS:
        assert set(form.fixtures) <= set(FIXTURES)
        assert not form.layout or (ROOT / f"tests/{form.layout}.py").is_file()
        assert [bool(form.message), bool(form.fixtures or form.kinds or form.layout)].count(True) == 1, form.name
    assert {name for form in FORMS for name in form.fixtures} == set(FIXTURES)


def test_every_type_of_ggml_is_read_or_named() -> None:
    types = json.loads((made(GGUF_TYPES) / "model/types.json").read_text())
    read = {number: name for number, (name, _) in PLAIN_TYPES.items()} | {
        number: kind.name for number, kind in BLOCK_TYPES.items()
    }
    assert {number: name for name, number in types.items()} == read | OTHER_TYPES


def test_the_table_of_the_documents_is_this_one() -> None:
    page = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
    assert table() in page, "replace the table of docs/formats.md by that of public_forms.table()"


def made(kind: str) -> Path:
    """The folder of a kind; skips where it was not made, or by another version."""
    folder = Path(MADE or "", kind)
    if MADE is None or not (folder / "version.json").is_file():
        pytest.skip("no folder with checkpoints of the packages: INGOT_PUBLIC_FORMS, see make_public_forms.py")
    written = " ".join(*json.loads((folder / "version.json").read_text()).items())
    if kind in VERSIONS:
        assert written == VERSIONS[kind], "name the version in public_forms.py and in the table"
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_the_package_is_read_as_the_package_means_it(kind: str) -> None:
    """The weights that the package computes with, else rounding of the original to the nearest code."""
    folder = made(kind)
    opened = Checkpoint.open(folder / "model")
    import_checkpoint(opened)
    original = load_file(folder / "original.safetensors")
    assert set(opened.encoded) == set(original)
    expected_file = folder / "expected.safetensors"
    expected = load_file(expected_file) if expected_file.is_file() else {}
    for name, weight in expected.items():
        found = opened.encoded[name].dequantize()
        # The package multiplies in another order; codes that differ would differ by a step.
        assert np.allclose(found, weight, rtol=1e-6, atol=1e-9), f"{name}: {np.abs(found - weight).max()}"
    for name, weight in original.items() if not expected else ():
        decoded = opened.encoded[name].decode()
        assert isinstance(decoded, DecodedWeight)
        columns = weight.shape[1] // decoded.scales.shape[1]
        steps = np.repeat(np.abs(decoded.scales), columns, axis=1)
        distance = np.abs(decoded.dequantize() - weight) / steps
        assert distance.mean() < 0.3, f"{name}: {distance.mean()} steps"
        assert distance.max() < 1.1, f"{name}: {distance.max()} steps"


def test_blocks_of_every_type_that_is_read_are_those_of_the_package() -> None:
    folder = made(GGUF_TYPES)
    expected = load_file(folder / "expected.safetensors")
    for kind in BLOCK_TYPES.values():
        blocks = np.load(folder / f"model/{kind.name}.npy")
        values = expected[kind.name]
        found = decode_rows(blocks.reshape(-1), kind, *values.shape).dequantize()
        assert np.array_equal(found, values), f"{kind.name}: {np.abs(found - values).max()}"


@pytest.mark.parametrize("kind", NOT_READ_KINDS)
def test_a_checkpoint_of_a_package_that_is_not_read_is_refused(kind: str) -> None:
    with pytest.raises(CheckpointError, match=NOT_READ):
        Checkpoint.open(made(kind) / "model")
