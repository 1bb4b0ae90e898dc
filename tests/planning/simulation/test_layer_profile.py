"""A profile by layer times steps, refuses damage by file and line, and replays a real engine's run."""

import json
from pathlib import Path

import numpy as np
import pytest

from ingot.artifact import KVGeometry
from ingot.errors import DataError
from ingot.planning.simulation.layer_profile import LayerProfile
from ingot.planning.simulation.replica import Replica, serve
from ingot.planning.simulation.simulated_executor import EngineShape
from ingot.planning.step_model import StepShape
from tests.data_paths import shared_data
from tests.each_case import each_case
from tests.planning.simulation.engines import request

TABLES = {
    "dense.csv": "layer,tokens,time_us\nqkv_proj,1,10\nqkv_proj,11,20\nlayernorm,1,1\nembedding,1,5\n",
    "per_sequence.csv": "layer,sequences,time_us\nlm_head,1,100\nlm_head,3,120\n",
    "attention.csv": (
        "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n16,0,0,0,4\n32,0,0,0,8\n0,0,1,16,2\n0,0,1,32,4\n0,0,2,16,4\n"
        "0,0,2,32,8\n"
    ),
    "skew_fit.csv": (
        "pc,n_label,skew_rate_label,kv_big_label,kp_label,alpha,n_samples\n0,n<=2,sr>70%,kvB<=1k,kp=0,0.5,4\n"
    ),
}


def written(folder: Path, **changes: str) -> Path:
    for name, text in TABLES.items():
        (folder / name).write_text(changes.get(name.removesuffix(".csv"), text))
    return folder


def test_a_step_is_the_sum_of_its_layers(tmp_path: Path) -> None:
    profile = LayerProfile.read(written(tmp_path), num_layers=2)
    step = StepShape(decode_rows=2, context_tokens=48, longest_context=24, num_sequences=2)
    dense, attention, head = 2 * (11 + 2 * 1), 2 * 6, 110
    assert profile.seconds(step) == pytest.approx((5 + dense + attention + head) * 1e-6)


def test_contexts_of_several_lengths_take_a_share_of_what_the_longest_adds(tmp_path: Path) -> None:
    profile = LayerProfile.read(written(tmp_path), num_layers=1)
    even = StepShape(decode_rows=2, context_tokens=48, longest_context=24, num_sequences=2)
    uneven = StepShape(decode_rows=2, context_tokens=48, longest_context=32, num_sequences=2)
    assert profile.seconds(uneven) - profile.seconds(even) == pytest.approx(0.5 * (8 - 6) * 1e-6)


@each_case(
    ("changes", "message"),
    [
        (
            {"dense": "layer,tokens,time_us\nqkv_proj,1,x\n"},
            r"dense.csv:2: time_us is 'x'; it must be a number from 0 on",
        ),
        ({"dense": "layer,tokens\nqkv_proj,1\n"}, r"dense.csv:2: time_us is None"),
        ({"attention": TABLES["attention.csv"] + "1,1,1,1,-3\n"}, r"attention.csv:8: time_us is '-3'"),
        (
            {"skew_fit": TABLES["skew_fit.csv"] + "0,n?,sr>70%,kvB<=1k,kp=0,0.5,4\n"},
            r"skew_fit.csv:3: n_label is 'n\?'",
        ),
        ({"per_sequence": "layer,sequences,time_us\nlm_head,1,nan\n"}, r"per_sequence.csv:2: time_us is 'nan'"),
    ],
)
def test_damage_is_named_by_file_and_line(changes: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        LayerProfile.read(written(tmp_path, **changes), num_layers=1)


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"dense.csv cannot be read"):
        LayerProfile.read(tmp_path, num_layers=1)


def test_a_run_of_another_engine_is_replayed_from_the_profile_of_its_gpu() -> None:
    """Llama 3.1 8B on an RTX 4090, more requests than it can serve: queues are most of the times.

    That engine leaves no block free when it admits; the pool here has those more that this one leaves free: 1 % and one
    for each of some 35 running sequences.
    """
    folder = shared_data("plan/rtx4090-llama-3.1-8b")
    rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    rows.sort(key=lambda row: row["queued_ts"])
    start = rows[0]["queued_ts"]
    load = [
        request(row["queued_ts"] - start, row["input_toks"], row["output_toks"], line)
        for line, row in enumerate(rows, 1)
    ]
    shape = EngineShape(
        kv=KVGeometry(num_layers=32, num_kv_heads=8, head_dim=128, dtype="float16"),
        num_blocks=2588 + 2588 // 100 + 35,
        max_batch_tokens=2048,
        max_sequences=256,
        context_tokens=32768,
    )
    ended = {
        each.request.lengths.line: each
        for each in serve(Replica(shape, LayerProfile.read(folder / "profile", 32)), load)
    }
    found = [each.completion.metrics for _, each in sorted(ended.items()) if each.completion]
    assert len(found) == len(rows) == 300

    def error(both: list[tuple[float, float]], share: float | None = None) -> float:
        columns = np.array(both).T  # [predicted and measured, requests]
        one, other = (np.mean(each) if share is None else np.quantile(each, share) for each in columns)
        return abs(float(one / other) - 1)

    pairs = [*zip(found, rows, strict=True)]
    tpot = [
        (metrics.tpot_seconds, (row["last_token_ts"] - row["first_token_ts"]) / (row["output_toks"] - 1))
        for metrics, row in pairs
        if metrics.tpot_seconds is not None
    ]
    e2e = [(metrics.e2e_seconds, row["last_token_ts"] - row["queued_ts"]) for metrics, row in pairs]
    ttft = [(metrics.ttft_seconds or 0.0, row["first_token_ts"] - row["queued_ts"]) for metrics, row in pairs]
    assert error(tpot) <= 0.02
    assert error(e2e) <= 0.03
    assert error(ttft, share=0.9) <= 0.10
