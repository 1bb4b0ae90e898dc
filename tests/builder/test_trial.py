"""An artifact is loaded, run and asked for its sample before it is sealed; one that cannot be used is not sealed."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ingot.artifact import ArtifactWriter
from ingot.artifact.programs.launch_program import cubins_file
from ingot.builder import BuildResult, Observers, build, measurements
from ingot.builder.trial import try_artifact
from ingot.errors import ArtifactError, BuildError, DataError, EngineError, UsageError
from ingot.passes.manager import PassRecord
from ingot.pipeline.targets.cuda import writer as cuda_writer
from ingot.progress import NOTES
from ingot.runtime import Engine, SamplingParams
from ingot.validation.evidence_json import sealed_summary
from tests.conftest import UNMEASURED
from tests.data_paths import DEMO_MODEL, FIXTURES
from tests.simulators.fake_gpu import compile_nothing

LLAMA = FIXTURES / "checkpoints" / "llama"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A copy of the tiny llama to damage."""
    return Path(shutil.copytree(LLAMA, tmp_path / "checkpoint" / "llama"))


def build_llama(checkpoint: Path, output: Path, *overrides: str, observers: Observers | None = None) -> BuildResult:
    return build("fp32-cpu", [f"checkpoint={checkpoint}", *UNMEASURED, *overrides], output, observers)


def never(model: object, record: PassRecord) -> None:
    raise AssertionError(f"the pass {record.name} ran before the refusal")


REFUSED_BEFORE_WORK = Observers(after_pass=never)


def test_a_broken_tokenizer_is_refused_before_work_though_no_text_is_evaluated(llama: Path, tmp_path: Path) -> None:
    (llama / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ArtifactError, match=r"checkpoint/llama/tokenizer\.json"):
        build_llama(llama, tmp_path / "out", observers=REFUSED_BEFORE_WORK)
    assert not (tmp_path / "out").exists()


def test_a_kv_block_beyond_the_memory_is_not_sealed_and_the_older_artifact_stays(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = build_llama(llama, tmp_path / "out").artifact.manifest.identity
    real = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 1 if name == "SC_PHYS_PAGES" else real(name))
    with pytest.raises(BuildError) as error:
        build_llama(llama, tmp_path / "out", "engine.block_tokens=64")
    assert str(error.value).startswith("the artifact was built but cannot be used, so it is not sealed: a KV pool of ")
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["identity"] == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint", "out"]


def test_a_model_whose_logits_are_not_finite_is_not_sealed(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], 3e38)
    save_file(tensors, llama / "model.safetensors")
    with pytest.raises(BuildError, match=r"it is not sealed: .* logit of token 0 is nan"):
        build_llama(llama, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def test_a_sample_that_fails_is_not_sealed(two_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(engine: Engine, prompt: str, params: SamplingParams) -> None:
        raise EngineError(f"cannot generate from {prompt!r}")

    monkeypatch.setattr(Engine, "generate", fail)
    with pytest.raises(BuildError, match="not sealed: cannot generate from 'import os'"):
        build_llama(two_layers, tmp_path / "out", "generate={prompt: import os}")
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_that_fills_the_context_is_refused_before_work(two_layers: Path, tmp_path: Path) -> None:
    prompt = "generate={prompt: " + "x " * 100 + "}"
    with pytest.raises(UsageError, match=r"generate\.prompt cannot be continued: .*16"):
        build_llama(two_layers, tmp_path / "out", prompt, "context_tokens=16", observers=REFUSED_BEFORE_WORK)


def test_a_text_with_tokens_that_the_model_lacks_is_refused_before_work(llama: Path, tmp_path: Path) -> None:
    shutil.copy(DEMO_MODEL / "tokenizer.json", llama)
    evaluation = f"evaluation={{text: {DEMO_MODEL / 'heldout.txt'}, tokens: 64, window_tokens: 16}}"
    with pytest.raises(
        DataError, match=r"heldout\.txt: the tokenizer makes token \d+ of it, but .* vocabulary has 128"
    ):
        build_llama(llama, tmp_path / "out", evaluation, observers=REFUSED_BEFORE_WORK)


def test_an_unmeasured_build_has_the_sample_of_its_prompt(two_layers: Path, tmp_path: Path) -> None:
    result = build_llama(two_layers, tmp_path / "out", "generate={prompt: 'import ', max_tokens: 4}")
    assert result.sample is not None
    assert (result.sample.prompt, result.sample.baseline) == ("import ", None)
    with Engine.load(result.artifact) as engine:
        assert engine.generate("import ", SamplingParams(max_tokens=4)).text == result.sample.candidate


@pytest.mark.usefixtures("memory_of_this_process")
def test_without_a_prompt_both_continue_the_evaluation_text_and_the_evidence_keeps_it(
    two_layers: Path, tmp_path: Path
) -> None:
    evaluation = "evaluation={text: checkpoint:heldout.txt, tokens: 128, window_tokens: 64, layer_kl_tokens: 0}"
    result = build("int4-cpu", [f"checkpoint={two_layers}", evaluation, "gates=null"], tmp_path / "out")
    sample = result.sample
    assert sample is not None
    assert 20 < len(sample.prompt) < 200
    assert (two_layers / "heldout.txt").read_text(encoding="utf-8").startswith(sample.prompt)
    assert sample.baseline
    assert sample.candidate
    summary = sealed_summary(result.artifact)
    assert summary is not None
    assert summary.samples == (sample,)
    assert summary.origin is not None
    assert (summary.origin.recipe, summary.origin.checkpoint) == ("int4-cpu", two_layers.name)


SMALL_GPU = ("engine.max_batch_tokens=32", "gpu.decode_rows=[1]", "gpu.sms=[80, 90]")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU on this machine, and compiled kernels without code."""

    def open_device() -> None:
        raise EngineError("no GPU here")

    pytest.importorskip("triton", reason="the target requires it: pip install '.[cuda]'")
    monkeypatch.setattr(measurements, "open_device", open_device)
    monkeypatch.setattr(cuda_writer, "compile_kernels", compile_nothing)


@pytest.mark.usefixtures("no_gpu")
def test_a_gpu_program_is_checked_without_the_gpu_and_a_note_says_that_it_was_not_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", NOTES)
    overrides = [f"checkpoint={LLAMA}", *UNMEASURED, *SMALL_GPU]
    result = build("fp16-ort-cuda", overrides, tmp_path / "out")
    assert result.sample is None
    assert "the program was checked but not run, and generated no sample: no GPU here" in caplog.messages

    staged = result.artifact.path
    file = staged / cubins_file(80)
    kept = dict(list(load_file(file).items())[1:])
    save_file(kept, file)
    with ArtifactWriter(tmp_path / "other") as writer:
        shutil.copytree(staged / "program", writer.path / "program")
        manifest = result.artifact.manifest
        names = ("name", "model", "kv", "target", "program", "versions", "engine")
        writer.describe(**{name: getattr(manifest, name) for name in names})
        with pytest.raises(BuildError, match=r"not sealed: .*/other/program/\S+: holds no kernel '.*' for SM 80"):
            try_artifact(writer.path, writer.target, result.recipe, None)
