"""Ingot's quantizers next to auto-gptq, autoawq, gptqmodel, llm-compressor and auto-round: KL, perplexity, top-1.

    python -m benchmarks.quantizers.setup_packages     # once: a virtual environment for each package
    python -m benchmarks.quantizers.peers

Every quantizer gets the same checkpoint in float32, the same calibration tokens, bits and group size, and leaves the
same matrices unquantized: head, embedding, and those whose width no group divides. Packages write their own
checkpoints, which Ingot's readers read back and which are scored as Ingot's own weights are: multiplied in float32, so
that only the rounding is measured. Results of packages are kept in the working folder; --fresh makes them anew. Rows of
the JSON that this run did not measure stay unchanged.
"""

import hashlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import click
import numpy as np
import onnx_ir as ir

from benchmarks.paths import ROOT
from benchmarks.peers import DEFAULT_WORK, PeerFailed
from benchmarks.quantizers.accuracy import compare, first_sequences, halves
from benchmarks.quantizers.cases import CHAINS, MODELS, RealModel, Setting, data_folder, make_chain
from benchmarks.quantizers.runs import PEERS, VENVS, Case, Peer, run_peer
from benchmarks.quantizers.table import Row, markdown, update_json
from ingot.passes.calibration import calibrate_with
from ingot.passes.manager import PassManager
from ingot.passes.model_facts import MODEL
from ingot.pipeline.calibrate import CalibrationEngine, read_calibration_data
from ingot.pipeline.checkpoint.checkpoint import Checkpoint
from ingot.pipeline.compile import tool_versions
from ingot.pipeline.model.importer import import_checkpoint

_SEED = 0


@dataclass(frozen=True)
class Bench:
    """One model with its data: what is quantized, calibrated on, and scored on."""

    model: RealModel
    calibration: CalibrationEngine
    evaluation: CalibrationEngine
    sequences: Path

    @property
    def baseline(self) -> ir.Model:
        """The unquantized checkpoint in float32."""
        return load(self.model.checkpoint)

    def row(self, quantizer: str, setting: Setting, candidate: ir.Model, seconds: float, **facts: object) -> Row:
        """Score a model against the baseline."""
        kl, perplexity, top1 = compare(self.evaluation, self.baseline, candidate)
        return Row(
            self.model.name, setting.bits, setting.group_size, quantizer, kl, perplexity, top1, seconds, dict(facts)
        )


def load(folder: Path) -> ir.Model:
    """Import a checkpoint, quantized or not, as an IR."""
    return import_checkpoint(Checkpoint.open(folder), check_weights=False)


def open_bench(model: RealModel, sequences: int, sequence_tokens: int, tokens: int, work: Path) -> Bench:
    """Select the calibration tokens, and write them to the file that the packages read."""
    vocab = MODEL.of(load(model.checkpoint)).vocab_size
    with tempfile.TemporaryDirectory() as folder:
        evaluation = data_folder() / model.evaluation
        if model.calibration is None:
            evaluation, calibration = halves(evaluation, Path(folder))
        else:
            calibration = data_folder() / model.calibration
        drawn = read_calibration_data(calibration, model.checkpoint, sequences, sequence_tokens, _SEED, vocab)
        scored = first_sequences(evaluation, model.checkpoint, tokens, sequence_tokens, vocab)
    work.mkdir(parents=True, exist_ok=True)
    file = work / f"{model.name}-{hashlib.sha256(drawn.sequences.tobytes()).hexdigest()[:12]}.npy"
    np.save(file, drawn.sequences)
    start = partial(import_checkpoint, Checkpoint.open(model.checkpoint), check_weights=False)
    return Bench(model, CalibrationEngine(drawn, reference=start), CalibrationEngine(scored), file)


def measure_chain(bench: Bench, name: str, setting: Setting) -> Row:
    """One of Ingot's chains."""
    model = bench.baseline
    begin = time.perf_counter()
    with calibrate_with(bench.calibration):
        PassManager(make_chain(name, setting)).run(model)
    label = f"Ingot {name}, {'sym' if setting.symmetric else 'asym'}"
    return bench.row(label, setting, model, time.perf_counter() - begin, versions=tool_versions())


def measure_peer(bench: Bench, peer: Peer, setting: Setting, work: Path, venvs: Path, fresh: bool) -> Row:
    """Score a package's result on the case, or record why there is no result."""
    case = Case(bench.model.checkpoint, bench.sequences, setting.bits, setting.group_size, setting.keep)
    try:
        run = run_peer(peer, case, work / "runs", venvs, fresh)
    except PeerFailed as error:
        return Row(bench.model.name, setting.bits, setting.group_size, peer.label, failure=str(error))
    facts = asdict(run.outcome)
    return bench.row(peer.label, setting, load(run.checkpoint), facts.pop("seconds"), **facts)


def measure(
    bench: Bench,
    bits: tuple[int, ...],
    groups: tuple[int, ...],
    chains: tuple[str, ...],
    peers: tuple[str, ...],
    symmetries: tuple[bool, ...],
    work: Path,
    venvs: Path,
    fresh: bool,
) -> Iterator[Row]:
    """float32, then every case: the packages, then Ingot's chains without zero points, with them, or both."""
    yield bench.row("float32", Setting(16, 0, True), bench.baseline, 0.0)
    cases = [(width, size) for width in bits for size in bench.model.group_sizes if not groups or size in groups]
    for width, size in cases:
        for name in peers:
            if width in PEERS[name].bits:
                setting = Setting(width, size, PEERS[name].symmetric, bench.model.keep)
                yield measure_peer(bench, PEERS[name], setting, work, venvs, fresh)
        for name in chains:
            for symmetric in symmetries:
                yield measure_chain(bench, name, Setting(width, size, symmetric, bench.model.keep))


@click.command(help=__doc__)
@click.option("--model", "models", multiple=True, type=click.Choice(list(MODELS)), help="Default: all.")
@click.option("--bits", multiple=True, type=click.Choice([2, 3, 4, 8]), default=(4, 3), show_default=True)
@click.option("--group-size", "groups", multiple=True, type=int, help="Default: all of the model's.")
@click.option("--peer", "peers", multiple=True, type=click.Choice([*PEERS, "none"]), help="Default: all.")
@click.option("--chain", "chains", multiple=True, type=click.Choice([*CHAINS, "none"]), help="Default: all.")
@click.option("--symmetry", type=click.Choice(["both", "sym", "asym"]), default="both", help="Of Ingot's chains.")
@click.option("--sequences", default=64, show_default=True, help="Calibration sequences.")
@click.option("--sequence-tokens", default=256, show_default=True)
@click.option("--tokens", default=30_720, show_default=True, help="Evaluation tokens.")
@click.option("--fresh", is_flag=True, help="Run the packages again.")
@click.option("--work", type=click.Path(path_type=Path), default=DEFAULT_WORK / "quantizers", help="Kept runs.")
@click.option("--venvs", type=click.Path(path_type=Path), default=VENVS, help="The packages' environments.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/quantizer-peers.json"
)
def main(
    models: tuple[str, ...],
    bits: tuple[int, ...],
    groups: tuple[int, ...],
    peers: tuple[str, ...],
    chains: tuple[str, ...],
    symmetry: str,
    sequences: int,
    sequence_tokens: int,
    tokens: int,
    fresh: bool,
    work: Path,
    venvs: Path,
    json_path: Path,
) -> None:
    """Measure, write the JSON as it grows, print the table."""
    wanted_peers = tuple(name for name in peers or PEERS if name != "none")
    wanted_chains = tuple(name for name in chains or CHAINS if name != "none")
    symmetries = {"both": (False, True), "sym": (True,), "asym": (False,)}[symmetry]
    rows: list[Row] = []
    for name in models or tuple(MODELS):
        bench = open_bench(MODELS[name], sequences, sequence_tokens, tokens, work)
        facts = asdict(bench.calibration.facts)
        for row in measure(bench, bits, groups, wanted_chains, wanted_peers, symmetries, work, venvs, fresh):
            click.echo(row.line(), err=True)
            rows.append(row)
            update_json(json_path, name, facts, [row])
    click.echo(markdown(rows))


if __name__ == "__main__":
    main()
