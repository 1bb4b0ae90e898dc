"""The wheel, installed in an environment of its own outside of the tree: without extras, then with the compiler."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.cli.main import COMMANDS
from tests.conftest import BuildArtifact, locked
from tests.data_paths import FIXTURES, ROOT
from tests.each_case import each_case
from tests.packaging.compile_once import as_cc

pytestmark = pytest.mark.slow
CHECKPOINT = str(FIXTURES / "checkpoints/llama")
NEEDS_COMPILER = (  # ARTIFACT is replaced by a folder
    ("build", "demo"),
    ("export", "demo", "--to", "gguf", "-o", "out"),
    ("import", CHECKPOINT, "-o", "out"),
    ("lint-checkpoint", CHECKPOINT),
    ("passes",),
    ("quantize-report", "ARTIFACT"),
    ("recipes", "demo"),
    ("schema",),
    ("transcode", CHECKPOINT, "--to", "gguf", "-o", "out"),
    ("tune", "demo", "-o", "out.json"),
)


class Install:
    """A virtual environment that Ingot's wheel was installed in."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"

    def run(self, *command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program of this environment; `environment` replaces variables, and an empty value removes one."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "INGOT_", "VIRTUAL"))
        }
        variables = {name: value for name, value in {**kept, **environment}.items() if value}
        program, *arguments = map(str, command)
        return subprocess.run([self.bin / program, *arguments], cwd=cwd, env=variables, capture_output=True, text=True)

    def ingot(self, *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        return self.run("ingot", *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def runtime(folder_of_run: Path) -> Install:
    """Ingot without extras."""
    pytest.importorskip("hatchling", reason="needs the dev group (pip install --group dev)")
    folder = folder_of_run / "install-runtime"
    with locked(folder.with_suffix(".lock")):
        if not folder.exists():
            wheels = folder_of_run / "install-wheel"
            hatch = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(wheels)]
            subprocess.run(hatch, cwd=ROOT, env={**os.environ, **as_cc()}, check=True, capture_output=True)
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            (wheel,) = wheels.glob("*.whl")
            subprocess.run([folder / "bin/pip", "install", "--quiet", "--no-compile", str(wheel)], check=True)
    return Install(folder)


@pytest.fixture(scope="module")
def compiler(runtime: Install, folder_of_run: Path) -> Install:
    """The runtime's environment and the extra `compiler`, added as the message of a command that needs it says."""
    folder = folder_of_run / "install-compiler"
    with locked(folder.with_suffix(".lock")):
        if not folder.exists():
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
            sites = [next((env / "lib").glob("python3*/site-packages")) for env in (runtime.bin.parent, folder)]
            (sites[1] / "runtime.pth").write_text(f"{sites[0]}\n")
            refused = runtime.ingot("passes", cwd=folder_of_run).stderr
            *_, requirement = shlex.split(refused.partition("; ")[2])
            pip = [str(runtime.bin / "pip"), "--python", str(folder)]
            subprocess.run([*pip, "install", "--quiet", "--no-compile", requirement], check=True)
    return Install(folder)


@pytest.fixture(scope="module")
def artifact(build_unmeasured: BuildArtifact, two_layers: Path) -> Path:
    return build_unmeasured("int4-cpu", two_layers).path


@each_case("arguments", [[], ["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_every_help_works_without_extras(runtime: Install, arguments: list[str], tmp_path: Path) -> None:
    done = runtime.ingot(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: ingot" in done.stdout or arguments == ["--version"]


@each_case("arguments", NEEDS_COMPILER, ids=lambda arguments: arguments[0])
def test_a_command_names_the_extra_that_it_needs(
    runtime: Install, artifact: Path, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    done = runtime.ingot(*(artifact if word == "ARTIFACT" else word for word in arguments), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: this command needs onnx")
    assert re.search(r"pip install 'ingot-llm\[compiler\] @ file://.*\.whl'$", done.stderr)
    assert len(done.stderr.splitlines()) == 1


def test_serving_names_its_own_extra(runtime: Install, artifact: Path, tmp_path: Path) -> None:
    done = runtime.ingot("serve", artifact, cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "pip install 'ingot-llm[serve] @ file://" in done.stderr


def test_recipes_are_listed_without_extras(runtime: Install, tmp_path: Path) -> None:
    listed = json.loads(runtime.ingot("recipes", "--json", cwd=tmp_path).stdout)
    assert {"demo", "int4-cpu"} <= {recipe["name"] for recipe in listed}


def test_an_artifact_runs_without_extras(runtime: Install, artifact: Path, tmp_path: Path) -> None:
    done = runtime.ingot("run", artifact, "def read(", "--max-tokens", "4", "--json", cwd=tmp_path)
    assert len(json.loads(done.stdout)["token_ids"]) == 4
    checked = runtime.ingot("validate", artifact, cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    shown = runtime.ingot("inspect", artifact, cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")


def test_the_installed_kernel_is_used(runtime: Install, tmp_path: Path) -> None:
    native = "ingot.runtime.cpu.native"
    code = (
        f"from {native}.attention import attention_backend; from {native}.library import native_library;"
        " print(attention_backend(), native_library())"
    )
    shown = runtime.run("python", "-c", code, cwd=tmp_path).stdout
    assert str(runtime.bin.parent) in shown
    assert shown.startswith("native-")


PLACES = {
    "as a module": ("python", "-m", "ingot"),
    "as a module of a safe path": ("python", "-P", "-m", "ingot"),
    "as a script": ("ingot",),
}


@pytest.mark.parametrize("command", PLACES.values(), ids=PLACES.keys())
def test_folders_of_the_same_names_change_nothing(
    runtime: Install, artifact: Path, command: tuple[str, ...], tmp_path: Path
) -> None:
    for name in ("ingot", "runtime", "pipeline", "click"):
        (tmp_path / name).mkdir()
    (tmp_path / "runtime/__init__.py").write_text("raise RuntimeError('imported from the working folder')\n")
    done = runtime.run(*command, "run", artifact, "x", "--max-tokens", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("home", ["", "/nonexistent", "/sys"])
def test_it_runs_without_a_home_that_can_be_written(
    runtime: Install, artifact: Path, home: str, tmp_path: Path
) -> None:
    done = runtime.run("ingot", "run", artifact, "x", "--max-tokens", "1", cwd=tmp_path, HOME=home)
    assert done.returncode == 0, done.stderr
    assert "elemetry" not in done.stderr


def test_the_demo_model_is_fetched_with_the_source(compiler: Install, tmp_path: Path) -> None:
    refused = compiler.run("python", "-m", "ingot", "build", "demo", cwd=tmp_path)
    assert refused.returncode == 2
    assert "`ingot init-demo` fetches it from https://" in refused.stderr
    fetched = compiler.run("python", "-m", "ingot", "init-demo", "demo", "--from", ROOT, cwd=tmp_path)
    assert fetched.returncode == 0, fetched.stderr
    options = ("--set=evaluation=null", "--set=latency=null", "--set=gates={}", "--set=generate=null")
    built = compiler.run("python", "-m", "ingot", "build", "demo/recipes/demo.yaml", *options, cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "artifacts/demo/manifest.json").is_file()


def test_a_model_is_built_and_run(compiler: Install, tmp_path: Path) -> None:
    options = [f"--set={key}" for key in ("evaluation=null", "latency=null", "gates={}")]
    options.append(f"--set=checkpoint={FIXTURES / 'checkpoints/llama'}")
    built = compiler.run("python", "-m", "ingot", "build", "fp32-cpu", *options, "-o", "out", cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    checked = compiler.run("python", "-m", "ingot", "validate", "out", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    shown = compiler.run("python", "-m", "ingot", "passes", "gptq", cwd=tmp_path)
    assert "gptq (quantization)" in shown.stdout
