"""Repeated text is counted at any place of a prompt, and other text is not."""

import random

from ingot.runtime.server.prompt_pieces import PromptPieces


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


def test_short_prompts_have_no_pieces() -> None:
    pieces = PromptPieces()
    for _ in range(8):
        pieces.observe([1, 2, 3])
    assert pieces.num_pieces == 0
