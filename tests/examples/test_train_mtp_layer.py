"""The training of an MTP layer lowers its losses, leaves the model alone, and writes a checkpoint with its README."""

# mypy: disable-error-code="no-untyped-call"
# torch leaves some of its methods without annotations.

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="examples train with torch: pip install --group oracle")
pytest.importorskip("transformers")

from click.testing import CliRunner  # noqa: E402
from examples import mtp_acceptance, train_mtp_layer  # noqa: E402
from examples.mtp_layer import make_layer  # noqa: E402
from examples.stdlib_corpus import Corpus, Module  # noqa: E402
from examples.train_mtp_layer import add_continuations, draft_losses, main  # noqa: E402
from examples.training import Budget, Method, train  # noqa: E402

from tests.examples.test_mimo_checkpoint import assert_holds  # noqa: E402
from tests.examples.tiny_llama import tiny_llama, write_tiny_llama  # noqa: E402

METHOD = Method(sequences=2, tokens=24, with_muon=True, warm_up=5)
TEXT = "".join(f"def function_{number}(x):\n    return x + {number}\n" for number in range(400))
CORPUS = Corpus((Module("abc.py", TEXT),), (Module("copy.py", TEXT[:4000]),))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and short pieces of text."""
    for name, value in {
        "METHOD": METHOD,
        "FITTED": Method(sequences=4, tokens=40),
        "NUM_PROMPTS": 3,
        "PROMPT_TOKENS": 8,
        "read_corpus": lambda: CORPUS,
    }.items():
        monkeypatch.setattr(train_mtp_layer, name, value)
    monkeypatch.setattr(mtp_acceptance, "NUM_WINDOWS", 2)


def test_training_lowers_the_losses_of_all_depths() -> None:
    base = tiny_llama()
    tokens = torch.randint(0, 320, (2, METHOD.tokens + 1))
    row = tokens.flatten().numpy()
    layer = make_layer(base, tokens)
    losses = partial(draft_losses, base, layer)
    before = [loss.item() for loss in losses(tokens)]
    assert train(layer, losses, np.resize(row, 500), METHOD, Budget(40, 0.0), 0) == 40
    after = [loss.item() for loss in losses(tokens)]
    assert after[0] < before[0] - 0.1
    assert after[1] < before[1] - 0.2


def test_half_of_the_tokens_are_the_models_own_continuations() -> None:
    base, tokens = tiny_llama(), np.arange(300)
    found = add_continuations(base, tokens, 0)
    assert np.array_equal(found[:300], tokens)
    rows = found[300:][: 3 * METHOD.tokens].reshape(3, -1)
    assert np.array_equal(np.diff(rows[:, :8]), np.ones((3, 7)))  # a piece of the tokens
    greedy = base(torch.from_numpy(rows)).logits.argmax(-1).numpy()
    assert np.array_equal(rows[:, 8:-1], greedy[:, 7:-2])
    assert not rows[:, -1].any()


def test_the_program_writes_a_checkpoint_with_its_figures(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "base", CORPUS, max_position_embeddings=512)
    arguments = ["--base", str(tmp_path / "base"), "--out", str(tmp_path / "out"), "--steps", "3"]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert_holds(tmp_path / "out", tmp_path / "base")
    page = (tmp_path / "out/README.md").read_text("utf-8")
    assert "| training | 3 steps of 2 x 24 tokens (144 tokens)" in page
    assert "Made by `python -m examples.train_mtp_layer --steps 3`" in page


def test_a_folder_that_exists_and_a_base_that_does_not_fit_are_refused(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    done = CliRunner().invoke(main, ["--out", str(tmp_path)])
    assert "exists; name a new folder" in done.output
    done = CliRunner().invoke(main, ["--base", str(tmp_path / "base"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert "lacks config.json, model.safetensors" in done.output.replace("\n", " ")
