"""Repeated text is counted at any place of a prompt, and other text is not."""

import gc
import random
import subprocess
import sys
import tracemalloc

from ingot.runtime.server.models.prompt_repeats import PromptPieces


def observe(prompts: list[list[int]]) -> float:
    pieces = PromptPieces()
    for prompt in prompts:
        for _ in range(4):  # one prompt in four is looked at
            pieces.observe(prompt if _ == 0 else [])
    return pieces.num_repeated / pieces.num_pieces


def test_shared_text_is_seen_wherever_it_begins() -> None:
    rng = random.Random(0)
    shared = [rng.randrange(50_000) for _ in range(2000)]
    others = [[rng.randrange(50_000) for _ in range(500)] for _ in range(20)]
    assert observe([other[: rng.randrange(1, 200)] + shared for other in others]) > 0.8
    assert observe(others) < 0.01


def test_text_that_repeats_from_the_first_token_on_is_counted_apart() -> None:
    rng = random.Random(0)

    def words(number: int) -> list[int]:
        return [rng.randrange(50_000) for _ in range(number)]

    begin, middle = words(1000), words(1000)
    pieces = PromptPieces()

    def leading(prompt: list[int]) -> tuple[float, float]:
        """Shares of the pieces of a prompt that repeat, and that repeat from the first token on."""
        before = pieces.num_pieces, pieces.num_repeated, pieces.num_leading
        for number in range(4):  # one prompt in four is looked at
            pieces.observe([] if number else prompt)
        return ((pieces.num_repeated - before[1]) / (pieces.num_pieces - before[0]),
                (pieces.num_leading - before[2]) / (pieces.num_pieces - before[0]))  # fmt: skip

    assert leading(begin + middle) == (0, 0)
    assert leading(begin + middle) == (1, 1)
    repeated, first = leading(begin + words(40) + middle)
    assert repeated > 0.9
    assert 0.3 < first < 0.7, "what follows the new words does not count"
    repeated, first = leading(words(40) + begin + middle)
    assert repeated > 0.9
    assert first == 0
    assert leading(begin[1:] + middle)[1] == 0, "the same text a token earlier is of no use to a prefix cache"


def test_short_prompts_have_no_pieces() -> None:
    pieces = PromptPieces()
    for _ in range(8):
        pieces.observe([1, 2, 3])
    assert pieces.num_pieces == 0


def test_a_piece_is_found_again_after_16384_others() -> None:
    rng = random.Random(0)
    shared = [rng.randrange(50_000) for _ in range(4000)]
    others = [[rng.randrange(50_000) for _ in range(8000)] for _ in range(33)]  # 16,500 pieces
    pieces = PromptPieces()
    for prompt in (shared, *others, shared):
        for number in range(4):  # one prompt in four is looked at
            pieces.observe([] if number else prompt)
    of_shared = pieces.num_pieces - 33 * 500
    assert pieces.num_pieces > 16_384
    assert pieces.num_repeated > 0.8 * of_shared / 2


def test_equal_tokens_are_new_once() -> None:
    assert observe([[0] * 100]) == 0.0
    assert observe([[0] * 100] * 4) == 0.75


def test_memory_does_not_grow_with_what_was_seen() -> None:
    rng = random.Random(0)
    pieces = PromptPieces()

    def allocated() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = allocated()
        for _ in range(40):
            pieces.observe([rng.randrange(50_000) for _ in range(8000)])
        grown = allocated() - before
    finally:
        tracemalloc.stop()
    assert pieces.num_pieces > 4000
    assert grown < 16 * pieces.num_pieces


def test_the_first_prompt_imports_nothing() -> None:
    code = (
        "import sys; from ingot.runtime.server.models.prompt_repeats import PromptPieces as Pieces;"
        "before = {*sys.modules};"
        "pieces = Pieces(); pieces.observe(list(range(2000))); print(pieces.num_pieces, {*sys.modules} - before)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    number, imported = found.split(maxsplit=1)
    assert int(number) > 0
    assert imported.strip() == "set()"
