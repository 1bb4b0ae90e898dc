"""Cases, their engines, and the records and table of the long-context benchmark."""

from pathlib import Path

import pytest
from benchmarks.cpu.long_context import COMPUTED, GGML_KV, INGOT, LLAMA_CPP, Case, cases, engines, groups, record, table
from benchmarks.cpu.rounds import Figure
from benchmarks.paths import ROOT

COMPARISON = Case("comparison", threads=1, kv_precision="int8", context_tokens=4096)
CHECK = Case("fill check", threads=2, kv_precision="float16", context_tokens=2048)


def figures(**rates: float) -> dict[str, Figure]:
    names = {
        "ingot": INGOT,
        "llama": LLAMA_CPP,
        "ingot_computed": INGOT + COMPUTED,
        "llama_computed": "llama.cpp computed",
    }
    return {names[name]: Figure(rate, 0.0, other_cores=0.0, is_quiet=True) for name, rate in rates.items()}


def test_the_checks_run_last_and_on_the_most_threads() -> None:
    wanted = cases((1, 2), ("float16", "int8"), (16384, 4096))
    assert [case.kind for case in wanted] == ["comparison"] * 8 + ["fill check"] * 2
    assert [case.context_tokens for case in wanted[:2]] == [4096, 16384]
    assert {case.threads for case in wanted[8:]} == {2}


def test_contexts_of_one_precision_and_thread_count_share_their_engines() -> None:
    found = groups(cases((1, 2), ("float16", "int8"), (4096, 16384)))
    assert [len(group) for group in found] == [2, 2, 2, 2, 1, 1]
    assert all(len({(case.kind, case.threads, case.kv_precision) for case in group}) == 1 for group in found)


def test_a_comparison_has_the_same_kv_precision_in_both_engines() -> None:
    peers = engines(COMPARISON, Path("artifact"))
    assert list(peers) == [INGOT, LLAMA_CPP]
    assert peers[INGOT].options == {"artifact": "artifact", "computed_tokens": 512}
    assert peers[LLAMA_CPP].options == {"kv": "q8_0", "computed_tokens": 512, "file_type": "q4_0"}


def test_a_check_has_each_engine_with_copies_and_with_the_whole_prompt_computed() -> None:
    peers = engines(CHECK, Path("artifact"))
    computed = {name: peer.options["computed_tokens"] for name, peer in peers.items()}
    assert computed == {INGOT: 512, LLAMA_CPP: 512, INGOT + COMPUTED: 2048, LLAMA_CPP + COMPUTED: 2048}


@pytest.mark.parametrize("case", [COMPARISON, CHECK])
def test_every_engine_has_a_module_and_a_part_in_a_ratio(case: Case) -> None:
    peers = engines(case, Path("artifact"))
    assert all((ROOT / (peer.module.replace(".", "/") + ".py")).is_file() for peer in peers.values())
    assert {name for pair in case.ratios.values() for name in pair} == set(peers)


def test_ratios_are_those_of_one_round_and_the_medians_of_all() -> None:
    rounds = [figures(ingot=10.0, llama=5.0), figures(llama=5.0, ingot=15.0), figures(ingot=8.0, llama=2.0)]
    found = record(COMPARISON, rounds, decoded_tokens=16)
    name = "ingot / llama.cpp"
    assert [one["ratio"][name] for one in found["rounds"]] == [2.0, 3.0, 4.0]
    assert found["ratio"] == {name: 3.0}
    assert found["tokens_per_second"] == {INGOT: 10.0, LLAMA_CPP: 5.0}
    assert found["context_tokens"] == 4096


def test_a_check_compares_each_engine_with_itself() -> None:
    rounds = [figures(ingot=10.0, ingot_computed=8.0, llama=5.0, llama_computed=10.0)]
    assert record(CHECK, rounds, 16)["ratio"] == {"ingot: copied / computed": 1.25, "llama.cpp: copied / computed": 0.5}


def test_a_disturbed_figure_is_named_in_its_round() -> None:
    rounds = [{INGOT: Figure(10.0, 0.0, 0.0, is_quiet=True), LLAMA_CPP: Figure(5.0, 0.0, 0.81234, is_quiet=False)}]
    (found,) = record(COMPARISON, rounds, 16)["rounds"]
    assert found["disturbed"] == [LLAMA_CPP]
    assert found["other_cores"] == {INGOT: 0.0, LLAMA_CPP: 0.812}


def test_the_table_has_a_row_for_each_comparison_with_the_spread_of_its_rounds() -> None:
    rounds = [figures(ingot=10.0, llama=5.0), figures(ingot=12.0, llama=3.0)]
    check = [figures(ingot=10.0, ingot_computed=8.0, llama=5.0, llama_computed=10.0)]
    lines = table([record(COMPARISON, rounds, 16), record(CHECK, check, 16)]).splitlines()
    assert lines[2:] == ["| 1 | int8, q8_0 | 4096 | 11.0 | 4.0 | 3.00 (2.00 to 4.00) |"]


def test_every_precision_of_the_comparison_has_llama_cpps_type() -> None:
    assert GGML_KV == {"float16": "f16", "int8": "q8_0"}
