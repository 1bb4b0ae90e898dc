"""compile_recipe: the files that it writes, and the progress that it reports."""

import json
import shutil
from pathlib import Path

import pytest

from ingot.errors import DataError, UsageError
from ingot.pipeline.compile import calibration_engine, compile_recipe, open_source
from ingot.pipeline.recipe.load import load_recipe
from ingot.progress import progress_to
from ingot.runtime import Tokenizer
from tests.data_paths import DEMO_MODEL, FIXTURES


def test_every_long_stage_reports_its_progress(tmp_path: Path) -> None:
    reported: dict[str, list[tuple[int, int]]] = {}
    recipe = load_recipe("int4-cpu", [f"checkpoint={FIXTURES / 'checkpoints/llama'}"])
    with progress_to(lambda name, done, total: reported.setdefault(name, []).append((done, total))):
        compile_recipe(recipe, tmp_path)
    assert list(reported) == ["checking weights", "quantize-weights", "writing weights"]
    for steps in reported.values():
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
        assert steps[-1][0] == steps[-1][1]


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def test_a_chat_template_of_the_recipe_is_sealed_in_place_of_the_checkpoints(tmp_path: Path) -> None:
    model, given = shutil.copytree(DEMO_MODEL, tmp_path / "model"), tmp_path / "mine.jinja"
    given.write_text(TEMPLATE)
    for own in (False, True):
        if own:
            (model / "chat_template.jinja").write_text("the checkpoint's own")
        recipe = load_recipe("int8-cpu", [f"checkpoint={model}", f"chat_template={given}"])
        folder = tmp_path / f"out-{own}"
        folder.mkdir()
        compile_recipe(recipe, folder)
        assert (folder / "tokenizer/chat_template.jinja").read_text() == TEMPLATE
        assert "chat_template: tokenizer/chat_template.jinja\n" in (folder / "recipe.yaml").read_text()
        tokenizer = Tokenizer.load(folder / "tokenizer")
        assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "<user>Hi"


def test_calibration_renders_messages_by_the_recipes_template(tmp_path: Path) -> None:
    texts, given = tmp_path / "chats.jsonl", tmp_path / "mine.jinja"
    record = {"messages": [{"role": "user", "content": "def read_file(path):"}]}
    texts.write_text("".join(f"{json.dumps(record)}\n" for _ in range(40)))
    given.write_text(TEMPLATE)
    calibrated = [f"calibration={{text: {texts}, sequences: 2, sequence_tokens: 16, chat_template: true}}"]
    recipe = load_recipe("int4-gptq-cpu", [f"checkpoint={DEMO_MODEL}", *calibrated, f"chat_template={given}"])
    source = open_source(recipe)
    engine = calibration_engine(recipe, source, recipe.make_passes())
    assert engine is not None
    tokenizer = Tokenizer.load(DEMO_MODEL)
    assert "<user>def read_file" in tokenizer.decode(engine.data.sequences[0].tolist())


def test_the_evaluation_text_is_refused_as_calibration_text_before_the_weights_are_read(tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl"
    copy.write_text(json.dumps({"text": (DEMO_MODEL / "heldout.txt").read_text(encoding="utf-8")}))
    texts = [f"calibration.text={copy}", "evaluation.text=checkpoint:heldout.txt"]
    recipe = load_recipe("int4-gptq-cpu", [f"checkpoint={DEMO_MODEL}", *texts])
    reported: list[str] = []
    with (
        pytest.raises(DataError, match=r"copy\.jsonl and the evaluation text heldout\.txt are the same text"),
        progress_to(lambda name, done, total: reported.append(name)),
    ):
        compile_recipe(recipe, tmp_path)
    assert reported == []


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (b"{% for %}", r"chat_template .*mine\.jinja: .*line 1: the chat template is not valid jinja2"),
        (b"\xff", r"chat_template .*mine\.jinja: is not UTF-8 text"),
    ],
)
def test_a_damaged_chat_template_fails_the_build_by_name(tmp_path: Path, template: bytes, message: str) -> None:
    given = tmp_path / "mine.jinja"
    given.write_bytes(template)
    recipe = load_recipe("int8-cpu", [f"checkpoint={DEMO_MODEL}", f"chat_template={given}"])
    with pytest.raises(DataError, match=message):
        open_source(recipe)


def test_a_mixture_of_experts_is_refused_for_a_gpu_by_name(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the target requires it: pip install '.[cuda]'")
    settings = [f"checkpoint={FIXTURES / 'checkpoints' / 'mixtral'}", "target=ort-cuda", "gpu.sms=[90]"]
    with pytest.raises(UsageError, match="target ort-cuda does not compute a mixture of experts, which model_type mi"):
        compile_recipe(load_recipe("fp32-cpu", settings), tmp_path)


def test_a_missing_chat_template_is_named() -> None:
    recipe = load_recipe("int8-cpu", [f"checkpoint={DEMO_MODEL}", "chat_template=none.jinja"])
    with pytest.raises(UsageError, match=r"chat_template 'none\.jinja' is not a file .*or remove the key"):
        open_source(recipe)


def test_program_tokenizer_and_recipe_are_written(tmp_path: Path) -> None:
    recipe = load_recipe("int8-cpu", [f"checkpoint={DEMO_MODEL}", "engine.block_tokens=32"])
    compiled = compile_recipe(recipe, tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["program", "recipe.yaml", "tokenizer"]
    assert (tmp_path / "tokenizer/tokenizer.json").read_bytes() == (DEMO_MODEL / "tokenizer.json").read_bytes()
    assert (tmp_path / "recipe.yaml").read_text() == recipe.resolved_yaml()
    assert compiled.written.kv.block_tokens == 32
    lowering = list(compiled.target.lowering)
    assert [record.name for record in compiled.passes][-len(lowering) :] == lowering
