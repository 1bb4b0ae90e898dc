"""Records of cells for the tests of ratios and tables."""

from typing import Any

from benchmarks.cpu.cells import WORK, Cell

DECODE, PREFILL = (next(work for work in WORK if work.part == part) for part in ("decode", "prefill"))
BANDWIDTH = 20e9


def engine(*rates: float, weight_bytes: int = 10**8) -> dict[str, Any]:
    facts = {"weight_bytes": weight_bytes, "kv_token_bytes": 10**6, "versions": {"package": "1.2"}, "notes": "notes"}
    return {
        "median": sorted(rates)[len(rates) // 2],
        "best": max(rates),
        "cpu_seconds_per_1000_tokens": 12.34,
        "disturbed_rounds": 0,
        "rounds": [{"tokens_per_second": rate} for rate in rates],
        "facts": facts,
    }


def record(
    work: Any = DECODE,
    failed: dict[str, str] | None = None,
    missing: dict[str, str] | None = None,
    **engines: dict[str, Any],
) -> dict[str, Any]:
    names = {"native": "ingot-native", "onnx": "ingot-onnxruntime", "llama": "llama.cpp-q4_0"}
    key = Cell("smollm2-135m", 1, work).key
    found = {names.get(name, name): each for name, each in engines.items()}
    day = "2026-01-02T03:04:05+00:00"
    return (
        key
        | {"measured_at": day, "bandwidth": BANDWIDTH, "engines": found}
        | {"failed": failed or {}, "missing": missing or {}}
    )
