"""The table of work: every cell that the comparison needs, in an order in which a long prompt is computed once."""

import json
from typing import get_args

from benchmarks.cpu.cells import LONG_PROMPT, PARTS, WORK, Cell, Part, cells_of, pool_tokens


def test_all_work_that_the_comparison_needs_is_there() -> None:
    assert {work.batch for work in WORK if work.part == "decode"} == {1, 8, 64}
    assert {work.prompt_tokens for work in WORK if work.part == "prefill"} == {512, LONG_PROMPT}
    assert {work.neighbours for work in WORK if work.part == "neighbours"} == {1, 2}
    recipes = {(work.batch, work.prompt_tokens, bool(work.steps)) for work in WORK if work.part == "recipes"}
    assert recipes == {(1, 64, True), (8, 16, True), (1, 512, False)}
    assert set(PARTS) == {*(work.part for work in WORK), "load"} == set(get_args(Part))


def test_the_long_context_follows_the_prefill_that_computes_it() -> None:
    order = [(work.part, work.sequences) for work in WORK]
    place = next(index for index, (part, _) in enumerate(order) if part == "context")
    assert order[place - 1] == ("prefill", order[place][1])


def test_sequences_have_room_for_every_round() -> None:
    most_rounds = 10
    for work in WORK:
        assert work.sequences.max_tokens - work.prompt_tokens > work.steps * most_rounds


def test_a_round_of_prefill_counts_its_prompt_and_one_of_decode_its_new_tokens() -> None:
    counted = {(work.part, work.batch, work.prompt_tokens): work.round_tokens for work in WORK if not work.neighbours}
    assert counted["prefill", 1, 512] == 512
    assert counted["decode", 8, 16] == 8 * 8


def test_neighbours_are_counted_in_words() -> None:
    assert [str(work).partition(", context 64, ")[2] for work in WORK if work.neighbours] == [
        "1 busy neighbour",
        "2 busy neighbours",
    ]


def test_parts_choose_cells_in_order() -> None:
    found = cells_of("smollm2-135m", 2, ("context", "prefill"))
    assert [str(cell.work) for cell in found] == [
        "prefill of 512 tokens",
        "prefill of 4096 tokens",
        "decode, batch 1, context 4096",
    ]
    assert {(cell.shape, cell.threads) for cell in found} == {("smollm2-135m", 2)}


def test_a_quick_run_leaves_long_prompts_out() -> None:
    found = cells_of("smollm2-135m", 1, ("decode", "prefill", "context"), quick=True)
    assert [str(cell.work) for cell in found] == [
        "decode, batch 1, context 64",
        "decode, batch 8, context 16",
        "decode, batch 64, context 16",
        "prefill of 512 tokens",
    ]


def test_the_pool_holds_the_largest_cell() -> None:
    cells = cells_of("smollm2-135m", 1, PARTS)
    assert pool_tokens(cells) == max(64 * (16 + 128), LONG_PROMPT + 512)


def test_keys_differ_and_leave_the_budget_out() -> None:
    keys = [json.dumps(Cell("smollm2-135m", 1, work).key) for work in WORK]
    assert len({*keys}) == len(keys)
    assert "budget" not in keys[0]
