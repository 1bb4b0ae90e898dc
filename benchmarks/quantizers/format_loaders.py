"""Load Ingot's exports with the packages that own the formats: same greedy tokens, largest difference of logits.

    python -m benchmarks.quantizers.setup_packages  # once: auto-gptq, autoawq, gptqmodel, compressed-tensors
    python -m benchmarks.cpu.setup_peers            # once: llama.cpp
    python -m benchmarks.quantizers.format_loaders MODEL

MODEL is quantized to 4 bits and exported to every format with float16 scales. The reference is Ingot's own engine on
the same weights in float32: the exported folder, read back and dequantized. A package that cannot load is named, with
the last lines of its output.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np

from benchmarks.adapters.loading import Loaded, Logits, Request
from benchmarks.device import device_facts
from benchmarks.paths import ROOT
from benchmarks.peers import PEERS_VENV, PeerFailed
from benchmarks.quantizers.runs import VENVS, run_in
from ingot.builder import build
from ingot.errors import IngotError
from ingot.pipeline.compile import tool_versions
from ingot.pipeline.interchange.export import export_checkpoint
from ingot.pipeline.recipe.load import load_recipe
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine

_PROMPT = "def read_file(path):\n    "
_HEADER = (
    "| format | scheme | loaded by | same greedy tokens | largest logit difference | of logits up to "
    "| reference's lead where they part |"
)
_GPTQ = (("load_gptqmodel", "gptqmodel"), ("load_auto_gptq", "auto_gptq"))  # symmetric: version 1, which both load
_AWQ = (("load_gptqmodel", "gptqmodel"), ("load_auto_awq", "auto_awq"))
_COMPRESSED = (("load_transformers", "llm_compressor"),)
_GGUF = (("load_transformers_gguf", "llm_compressor"), ("load_llama_cpp", ""))  # "": the peers' environment


@dataclass(frozen=True)
class Case:
    """A format, the scheme that is exported to it, and the loaders (benchmarks/adapters/load_*.py) with their venvs."""

    format_name: str
    symmetric: bool
    block_size: int
    loaders: tuple[tuple[str, str], ...]
    widen: bool = False

    @property
    def scheme(self) -> str:
        """In words."""
        return f"4 bits, {'symmetric' if self.symmetric else 'asymmetric'}, blocks of {self.block_size}"


CASES = (
    Case("gptq", True, 128, _GPTQ),
    Case("gptq", False, 128, _GPTQ[:1]),  # version 2
    Case("gptq-v1", False, 128, _GPTQ[1:]),
    Case("awq", True, 128, _AWQ),
    Case("awq", False, 128, _AWQ),
    Case("compressed-tensors", True, 128, _COMPRESSED),
    Case("compressed-tensors", False, 128, _COMPRESSED),
    Case("gguf", True, 32, _GGUF),
    Case("gguf", False, 32, _GGUF, widen=True),
)


@dataclass(frozen=True)
class Reference:
    """Ingot's result with the weights in float32: tokens after the prompt, logits [prompt + new, vocab]."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: Logits


@dataclass(frozen=True)
class Proof:
    """A row of the table. `failure` is the reason why there are no figures.

    lead    at the first different token: by how much the reference's token leads its second, which must be less than
            twice the largest difference of logits for the difference to be explained
    """

    format_name: str
    scheme: str
    loader: str
    same_tokens: int = 0
    new_tokens: int = 0
    largest_difference: float = 0.0
    largest_logit: float = 0.0
    lead: float | None = None
    versions: dict[str, str] | None = None
    failure: str = ""

    def line(self) -> str:
        """Of the table."""
        start = f"| {self.format_name} | {self.scheme} | {self.loader} |"
        if self.failure:
            return f"{start} {self.failure} | | | |"
        figures = f"{self.same_tokens} of {self.new_tokens} | {self.largest_difference:.2g} | {self.largest_logit:.1f}"
        return f"{start} {figures} | {'' if self.lead is None else f'{self.lead:.2g}'} |"


def export_case(checkpoint: Path, case: Case, folder: Path) -> Path:
    """Quantize and write; head and embedding stay unquantized."""
    rounding = "passes.quantize-weights."
    settings = {"block_size": case.block_size, "symmetric": case.symmetric, "lm_head": "none", "embedding": "none"}
    overrides = [f"checkpoint={checkpoint}", *(f"{rounding}{key}={json.dumps(v)}" for key, v in settings.items())]
    recipe = load_recipe("int4-cpu", overrides)
    return export_checkpoint(recipe, folder, case.format_name, round_scales=True, widen=case.widen)


def reference_of(exported: Path, work: Path, new_tokens: int) -> Reference:
    """Dequantize, build without any quantization, and run."""
    floats = export_checkpoint(load_recipe("fp32-cpu", [f"checkpoint={exported}"]), work / "floats", "safetensors")
    artifact = build("fp32-cpu", (f"checkpoint={floats}",), output=work / "artifact").artifact
    engine = Engine.load(artifact, prefix_cache=False)
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode(_PROMPT)
    completion = engine.generate(prompt, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
    tokens = tuple(completion.token_ids)
    chunks = [part.logits.copy() for part in engine.iterate_prompt_logits([[*prompt, *tokens]])]
    engine.close()
    return Reference(tuple(prompt), tokens, np.concatenate(chunks))


def prove(case: Case, loader: str, python: Path, exported: Path, reference: Reference, work: Path) -> Proof:
    """Load the folder with a package, and compare."""
    scored, file = (*reference.prompt, *reference.tokens), work / f"{loader}.npy"
    request = Request(exported.resolve(), reference.prompt, len(reference.tokens), scored, file.resolve())
    answer = run_in(python, f"benchmarks.adapters.{loader}", json.dumps(asdict(request), default=str))
    loaded = Loaded(**json.loads(answer))
    return compare(case, reference, loaded, np.load(file))


def compare(case: Case, reference: Reference, loaded: Loaded, logits: Logits) -> Proof:
    """The number of equal tokens before the first difference, and the difference of all logits."""
    pairs = zip(loaded.tokens, reference.tokens, strict=True)
    same = next((at for at, (one, other) in enumerate(pairs) if one != other), len(reference.tokens))
    return Proof(
        format_name=case.format_name,
        scheme=case.scheme,
        loader=next(iter(loaded.versions)),
        same_tokens=same,
        new_tokens=len(reference.tokens),
        largest_difference=float(np.abs(logits - reference.logits).max()),
        largest_logit=float(np.abs(reference.logits).max()),
        lead=None if same == len(reference.tokens) else _lead(reference.logits[len(reference.prompt) + same - 1]),
        versions=loaded.versions,
    )


def _lead(logits: Logits) -> float:
    second, first = np.partition(logits, -2)[-2:]
    return float(first - second)


def proofs_of(checkpoint: Path, case: Case, new_tokens: int, venvs: Path, peers_python: Path) -> Iterator[Proof]:
    """Export once, load with every package."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        try:
            exported = export_case(checkpoint, case, work / "exported")
        except IngotError as error:
            yield Proof(case.format_name, case.scheme, "", failure=f"not written: {error}")
            return
        reference = reference_of(exported, work, new_tokens)
        for loader, venv in case.loaders:
            python = venvs / venv / "bin" / "python" if venv else peers_python
            try:
                yield prove(case, loader, python, exported, reference, work)
            except PeerFailed as error:
                yield Proof(case.format_name, case.scheme, loader.removeprefix("load_"), failure=str(error))


def write_json(path: Path, proofs: Sequence[Proof]) -> None:
    """Every row, with versions."""
    document = {"device": device_facts(), "ingot": tool_versions(), "proofs": [asdict(proof) for proof in proofs]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


@click.command(help=__doc__)
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--to", "formats", multiple=True, type=click.Choice(sorted({case.format_name for case in CASES})))
@click.option("--new-tokens", default=32, show_default=True)
@click.option("--venvs", type=click.Path(path_type=Path), default=VENVS, help="The packages' environments.")
@click.option("--peers-python", type=click.Path(path_type=Path), default=PEERS_VENV / "bin" / "python")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/format-loaders.json"
)
def main(
    checkpoint: Path, formats: tuple[str, ...], new_tokens: int, venvs: Path, peers_python: Path, json_path: Path
) -> None:
    """Check every case, print the table, write the JSON."""
    proofs: list[Proof] = []
    click.echo(_HEADER + "\n|---|---|---|---|---|---|---|")
    for case in CASES:
        if formats and case.format_name not in formats:
            continue
        for proof in proofs_of(checkpoint, case, new_tokens, venvs, peers_python):
            proofs.append(proof)
            click.echo(proof.line())
    write_json(json_path, proofs)


if __name__ == "__main__":
    main()
