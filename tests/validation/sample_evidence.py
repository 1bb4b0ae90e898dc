"""Deterministic evidence of a fictional pair: real accuracy and latency code on fake subjects."""

from dataclasses import replace

import numpy as np

from ingot.artifact.calibration_record import CalibrationRecord
from ingot.passes.fusion.pack_projections import PackProjections
from ingot.passes.manager import PassRecord
from ingot.passes.quantization.quantize_weights import QuantizeWeights
from ingot.validation.accuracy import AccuracyResult, measure_accuracy
from ingot.validation.evidence import collect
from ingot.validation.gates import GateSpec, decide
from ingot.validation.latency.measurement import LatencyResult, RequestRecord, Run, RunRecord, runs_of_round
from ingot.validation.machine import MachineLoad
from ingot.validation.memory import MemoryProbe, MemoryResult
from ingot.validation.memory_probe import ProcessMemory
from ingot.validation.options import AccuracyOptions, LatencyLoad, ServiceLevel
from ingot.validation.quantization import KlMeasurement, Quantization, WeightFigures
from ingot.validation.result import ArtifactSize, BuildNotes, Evidence, Origin, Sample, SizeResult, SubjectFacts
from ingot.validation.windows import EvaluationText
from tests.validation.fake_subject import TableSubject

CALIBRATED = CalibrationRecord("train.txt", "ef" * 32, 90_000, 16_384, 64, 12, "packed", 0, evaluation_overlap=0.021)
GATES = (
    GateSpec("perplexity_ratio", "max", 1.05),
    GateSpec("kl_mean", "max", 0.0021),
    GateSpec("top1_agreement", "min", 0.999),
    GateSpec("size_ratio", "max", 0.4),
    GateSpec("tpot_ratio", "max", 0.9),
    GateSpec("ttft_ratio@1", "max", 0.5, advisory=True),
)


def sample_evidence(gates: tuple[GateSpec, ...] = GATES, *, with_runs: bool = True) -> Evidence:
    """Evidence with every part; with_runs=False omits accuracy, latency and memory."""
    accuracy = _accuracy() if with_runs else None
    latency = _latency() if with_runs else None
    memory = MemoryResult((_probe(182), _probe(184), _probe(183)), (_probe(241), _probe(243), _probe(240)))
    sizes = SizeResult(
        ArtifactSize(4_812_304, 212_551, 260_113, 1_804), ArtifactSize(23_094_200, 198_420, 260_113, 1_720)
    )
    kept = memory if with_runs else None
    measured = collect(sizes, accuracy, latency, kept)
    return Evidence(
        candidate=SubjectFacts("stdlib-llama-6m <int4>", "ab" * 32, "cpu", "llama", 5_770_496, 1024, CALIBRATED),
        baseline=SubjectFacts("stdlib-llama-6m baseline", "cd" * 32, "cpu", "llama", 5_770_496, 1024),
        environment=_environment(),
        sizes=sizes,
        accuracy=accuracy,
        latency=latency,
        memory=kept,
        measured=measured,
        gates=tuple(decide(gates, measured)),
        notes=_notes() if with_runs else BuildNotes(),
        measured_at="2026-01-31T12:00:00Z",
    )


def _accuracy() -> AccuracyResult:
    rng = np.random.default_rng(5)
    baseline = rng.normal(0, 2.2, (96, 96)).astype(np.float32)
    noise = rng.normal(0, 0.065, (96, 96)) * rng.gamma(2.0, 0.5, (96, 1))
    tokens = rng.integers(0, 96, 120 * 32 + 1)
    text = EvaluationText("heldout.txt", "ef" * 32, tuple(int(token) for token in tokens))
    options = AccuracyOptions(tokens=120 * 32, window_tokens=32)
    candidate = TableSubject((baseline + noise).astype(np.float32))
    return measure_accuracy(candidate, TableSubject(baseline), text, options)


def _latency() -> LatencyResult:
    rng = np.random.default_rng(6)
    slo = ServiceLevel(ttft_seconds=0.06, tpot_seconds=0.004)
    options = LatencyLoad(concurrency=(1, 4), prompt_tokens=128, output_tokens=16, requests=8, slo=slo)
    load = MachineLoad(others=1.6, peak=1.94, cores=4, threads=4)
    return LatencyResult(
        options, tuple(_run(run, options, rng) for number in range(5) for run in runs_of_round(options, number)), load
    )


def _run(run: Run, options: LatencyLoad, rng: np.random.Generator) -> RunRecord:
    speed = (0.71 if run.side == "candidate" else 1.0) * run.level**0.6 * rng.normal(1, 0.04)
    requests = []
    for number in range(options.requests):
        start = number // run.level * 0.09 * speed
        gaps = rng.gamma(40, 0.0026 / 40, options.output_tokens) * speed
        gaps[0] = 0.031 * speed * rng.normal(1, 0.06)
        requests.append(RequestRecord(start, tuple(float(at) for at in start + np.cumsum(gaps))))
    return RunRecord(run, max(request.token_seconds[-1] for request in requests), tuple(requests))


def _probe(megabytes: int) -> MemoryProbe:
    peak, now = megabytes * 1_000_000, int(megabytes * 0.93e6)
    generated = ProcessMemory(peak, now, now * 3 // 5, now * 2 // 5)
    return MemoryProbe(generated, generated, generated)


def _environment() -> dict[str, object]:
    return {
        "gpu": {"name": "A GPU", "sm": 90, "memory_bytes": 80_000_000_000},
        "cpu": {"model": "A processor", "flags": ["avx2", "avx512_vnni", "fma"]},
        "cores_available": 2,
        "cores_total": 4,
        "memory_bytes": 16_000_000_000,
        "os": "Linux 6.1",
        "machine": "x86_64",
        "libc": "glibc 2.36",
        "python": "CPython 3.11.2",
        "threads": 2,
        "packages": {"ingot": "0.1.0", "numpy": "2.4.6", "onnxruntime": "1.31.1"},
    }


def _notes() -> BuildNotes:
    return BuildNotes(
        passes=(
            PassRecord(PackProjections(), 0.0042, 214, 178, 23_094_200, 23_094_200, modified=True),
            PassRecord(QuantizeWeights(bits=4), 1.31, 178, 202, 23_094_200, 4_812_304, modified=True),
        ),
        quantization=Quantization(
            (
                WeightFigures(
                    name="layers.0.mlp.down_proj",
                    tensor="model.layers.0.mlp.down_proj.weight.q",
                    bits=4,
                    block_size=32,
                    symmetric=True,
                    elements=196_608,
                    stored_bytes=110_592,
                    method="gptq",
                    relative_error=0.0713,
                    output_error=0.0412,
                    output_error_nearest=0.0809,
                    scale_min=0.0021,
                    scale_median=0.0134,
                    scale_max=0.0712,
                    outlier_share=0.00031,
                    peak_over_rms=9.4,
                    end_share=0.061,
                    kl=0.0042,
                ),
                WeightFigures(
                    "layers.0.mlp.up_proj",
                    "model.layers.0.mlp.up_proj.weight.q",
                    4,
                    32,
                    True,
                    196_608,
                    stored_bytes=110_592,
                    kl=0.001,
                ),
            ),
            KlMeasurement("heldout.txt", "ab" * 32, 2048, 512, 3.2),
        ),
        origin=Origin("int4-cpu", "stdlib-llama-6m", "0123456789abcdef" * 4),
        samples=(Sample("def f(", candidate="x):\n    return <x>", baseline="self):\n    pass"),),
    )


def weight(name: str, **figures: float) -> WeightFigures:
    """A weight of 1,000 elements in 4 bits."""
    return replace(WeightFigures(name, f"{name}.q", 4, 32, False, 1000, stored_bytes=625), **figures)  # type: ignore[arg-type]
