"""The project in benchmarks/ declares all that its modules import, and brings nothing else to Ingot's."""

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from module_graph import statements

from tests.data_paths import ROOT

FOLDER = ROOT / "benchmarks"
OF_CLONE = {"benchmarks", "tests", "examples", "hatch_build", "ingot"}
# Modules of distributions with another name.
DISTRIBUTIONS = {"onnx_ir": "onnx-ir", "ml_dtypes": "ml-dtypes"}
# Peers and clients are imported in environments of their own, see setup_peers.py, setup_packages.py and client_calls.
PEERS = {
    "agents", "aiconfigurator", "aider", "anthropic", "dspy", "expected", "framework_clients", "haystack", "httpx",
    "instructor", "langchain_anthropic", "langchain_openai", "litellm", "llama_index", "llm", "lm_eval", "pydantic_ai",
    "sdk_clients", "semantic_kernel", "smolagents",
    "auto_gptq", "auto_round", "awq", "compressed_tensors", "datasets", "gguf", "gptqmodel", "llama_cpp",
    "llmcompressor", "mistralrs", "onnxruntime_genai", "openvino", "openvino_genai", "transformers", "vllm",
}  # fmt: skip


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=~!; ]", requirement)[0] for requirement in requirements}


def imported_by(file: Path) -> set[str]:
    """Top-level modules that a file imports."""
    found = set[str]()
    for node in statements(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


def test_every_package_that_a_benchmark_imports_is_declared() -> None:
    ours, theirs = project(ROOT)["project"], project(FOLDER)["project"]
    extras = {**ours["optional-dependencies"], **theirs["optional-dependencies"]}
    declared = names_of(
        ours["dependencies"] + theirs["dependencies"] + [each for some in extras.values() for each in some]
    )
    imported = set[str]().union(*map(imported_by, FOLDER.rglob("*.py"))) - {*sys.stdlib_module_names} - OF_CLONE - PEERS
    assert {DISTRIBUTIONS.get(name, name) for name in imported} - declared == set()


def test_extras_of_ingot_that_it_names_exist() -> None:
    needed = re.search(r"ingot-llm\[(.+)\]", project(FOLDER)["project"]["dependencies"][0])
    assert needed is not None
    assert {*needed[1].split(",")} <= {*project(ROOT)["project"]["optional-dependencies"]}
