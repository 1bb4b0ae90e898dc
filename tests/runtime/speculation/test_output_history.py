"""Suffix decoding: copies from finished outputs of the same tenant, against a search of all that the window holds."""

import random
from array import array
from collections.abc import Sequence as Tokens

import pytest

from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.kv.keys import PrefixScope, prefix_scope
from ingot.runtime.requests.sampler import Sampler
from ingot.runtime.scheduling.sequence import Sequence
from ingot.runtime.speculation.drafter import DraftRequest, Proposal
from ingot.runtime.speculation.output_history import KEY_TOKENS, LONGEST_MATCH, PIECE_TOKENS, Match, OutputHistory
from ingot.runtime.speculation.prompt_lookup import PromptLookup

_ROOT = b"artifact"
SHARED, OTHER = prefix_scope(_ROOT), prefix_scope(_ROOT, cache_salt="other")


def tokens_of(values: Tokens[int]) -> "array[int]":
    return array("q", values)


def history(*outputs: Tokens[int], scope: PrefixScope = SHARED, window: int = 1024) -> OutputHistory:
    made = OutputHistory(window)
    for output in outputs:
        made.add(tokens_of(output), scope)
    made.settle(1 << 20)
    return made


def found(made: OutputHistory, last: Tokens[int], count: int = 8, scope: PrefixScope = SHARED) -> tuple[int, ...]:
    match = made.find(tokens_of(last), scope, count, longer_than=0)
    return () if match is None else match.copied


def request(prompt: Tokens[int], number: int, scope: PrefixScope = SHARED) -> DraftRequest:
    sequence = Sequence.of(number, prompt, 1000, scope=scope)
    return DraftRequest(sequence, Sampler(SamplingParams(), sequence.tokens), 4)


def finish(drafter: PromptLookup, prompt: Tokens[int], output: Tokens[int], scope: PrefixScope = SHARED) -> None:
    ended = request(prompt, 1_000_000, scope)
    ended.sequence.tokens.extend(output)
    drafter.forget(ended.sequence)


def test_what_another_request_got_is_drafted_and_ends_where_its_output_ended() -> None:
    made = history([1, 2, 3, 4, 5], [6, 7, 8])
    assert found(made, [9, 2, 3]) == (4, 5)
    assert found(made, [9, 2, 3], count=1) == (4,)
    assert found(made, [4, 5]) == found(made, [5, 6]) == found(made, [2]) == ()


def test_the_longest_match_wins_and_of_equal_ones_the_newest() -> None:
    made = history([1, 2, 3, 4, 7], [9, 2, 3, 4, 8], [5, 3, 4, 6])
    assert found(made, [1, 2, 3, 4]) == (7,)
    assert found(made, [0, 2, 3, 4]) == (8,)
    assert found(made, [0, 3, 4]) == (6,)


def test_of_equal_matches_one_with_tokens_to_copy_wins() -> None:
    made = history([1, 2, 7, 1, 2, 7, 1, 2, 7])
    assert found(made, [1, 2], count=4) == (7, 1, 2, 7)


def test_a_match_must_be_longer_than_the_requests_own() -> None:
    made = history([1, 2, 3, 4, 5])
    assert made.find(tokens_of([1, 2, 3]), SHARED, 4, longer_than=2) == Match((4, 5), 3)
    assert made.find(tokens_of([1, 2, 3]), SHARED, 4, longer_than=3) is None


@pytest.mark.parametrize("reader", [OTHER, prefix_scope(_ROOT, adapter="a"), prefix_scope(_ROOT, shared=False)])
def test_another_tenant_reads_nothing(reader: PrefixScope) -> None:
    made = history([1, 2, 3, 4, 5])
    # The reader has a number of its own.
    made.add(tokens_of([7, 8, 9]), reader)
    made.settle(100)
    assert found(made, [1, 2], scope=reader) == ()
    assert found(made, [1, 2]) == (3, 4, 5)
    assert found(made, [7, 8]) == ()


def test_equal_hashes_of_another_tenant_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.runtime.speculation.output_history._FACTOR", 0)
    made = history([1, 2, 3, 4, 5])
    made.add(tokens_of([7, 2, 3, 9]), OTHER)
    made.settle(100)
    assert found(made, [2, 3]) == (4, 5)
    assert found(made, [2, 3], scope=OTHER) == (9,)


def test_a_private_sequence_leaves_nothing() -> None:
    private = prefix_scope(_ROOT, shared=False)
    made = history([1, 2, 3, 4, 5], scope=private)
    assert len(made) == 0
    assert found(made, [1, 2], scope=private) == ()


def test_a_scope_that_was_not_seen_for_long_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.runtime.speculation.output_history._MOST_SCOPES", 2)
    made = history([1, 2, 3])
    for salt in "ab":
        made.add(tokens_of([4, 5, 6]), prefix_scope(_ROOT, cache_salt=salt))
    made.settle(100)
    assert found(made, [1, 2]) == ()
    assert found(made, [4, 5], scope=prefix_scope(_ROOT, cache_salt="b")) == (6,)


def test_a_long_output_is_indexed_piece_by_piece_without_a_gap() -> None:
    output = random.Random(0).sample(range(1000), 700)
    made = OutputHistory(1024)
    made.add(tokens_of(output), SHARED)
    while made._waiting:
        made.settle(7)
    for end in range(2, 690):
        assert found(made, output[max(0, end - 40) : end], count=10) == tuple(output[end : end + 10])


def test_outputs_that_wait_and_the_window_have_a_bound() -> None:
    made = OutputHistory(1024)
    for start in range(0, 20_000, 100):
        made.add(tokens_of(range(start, start + 100)), SHARED)
        assert made._num_waiting <= 1024
    made.settle(1 << 20)
    assert not made._waiting
    assert made._num_waiting == 0
    assert len(made) <= 1024
    assert found(made, [19_950, 19_951], count=2) == (19_952, 19_953)
    assert found(made, [50, 51]) == ()
    made.add(tokens_of(range(5000)), SHARED)
    made.settle(1 << 20)
    assert found(made, [4100, 4101], count=2) == (4102, 4103)


def searched(outputs: Tokens[Tokens[int]], last: Tokens[int], count: int) -> tuple[int, tuple[int, ...]]:
    """Length of the longest match, and its longest and newest continuation."""
    best, copy = min(KEY_TOKENS) - 1, tuple[int, ...]()
    for output in outputs:
        for place in range(min(KEY_TOKENS), len(output)):
            length, most = 0, min(LONGEST_MATCH, place, len(last))
            while length < most and output[place - 1 - length] == last[-1 - length]:
                length += 1
            after = tuple(output[place : place + count])
            if length >= min(KEY_TOKENS) and (length, len(after)) >= (best, len(copy)):
                best, copy = length, after
    return (best, copy) if copy else (0, ())


@pytest.mark.parametrize("vocab", [3, 30, 400])
def test_every_draft_follows_a_longest_match(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a limit of places, so that the search may look at all.
    monkeypatch.setattr("ingot.runtime.speculation.output_history.MOST_PLACES", 1 << 20)
    rng, num_found = random.Random(vocab), 0
    outputs = [[rng.randrange(vocab) for _ in range(rng.randrange(3, 60))] for _ in range(20)]
    made = history(*outputs)
    for _ in range(300):
        source = rng.choice(outputs)
        end = rng.randrange(2, len(source) + 1)
        last = [rng.randrange(vocab)] * rng.randrange(3) + source[max(0, end - rng.randrange(2, 40)) : end]
        length, copy = searched(outputs, last, 6)
        match = made.find(tokens_of(last), SHARED, 6, longer_than=0)
        assert (match.num_tokens if match else 0) == length
        assert (match.copied if match else ()) == copy
        num_found += bool(copy)
    assert num_found > 100


def test_the_longer_match_of_the_request_and_of_others_is_copied() -> None:
    drafter = PromptLookup(OutputHistory(1024))
    finish(drafter, [50, 51], [1, 2, 3, 4, 5])
    own_is_longer = request([9, 2, 3, 8, 7, 9, 2, 3], 0)
    others_is_longer = request([0, 3, 8, 7, 1, 2, 3], 1)
    nothing = request([60, 61, 62], 2)
    proposals = drafter.propose([own_is_longer, others_is_longer, nothing])
    assert proposals == [
        Proposal((8, 7, 9, 2), (1, 2, 3, 4), "lookup"),
        Proposal((4, 5), (1, 2), "suffix"),
        Proposal(),
    ]


def test_prompts_are_not_kept_and_what_is_kept_for_a_sequence_goes_with_it() -> None:
    drafter = PromptLookup(OutputHistory(1024))
    one = request([1, 2, 3, 1, 2], 0)
    assert drafter.propose([one])[0].tokens[:1] == (3,)
    drafter.forget(one.sequence)
    drafter.forget(one.sequence)
    assert not drafter._indexes
    assert drafter.propose([request([7, 1, 2], 1)]) == [Proposal()]
    drafter.close()
    assert not drafter._indexes
    assert drafter._history is not None
    assert len(drafter._history) == 0


def grown(made: OutputHistory, number: int, prompt: Tokens[int], scope: PrefixScope = SHARED) -> Sequence:
    sequence = Sequence.of(number, prompt, 100_000, scope=scope)
    made.grow(sequence)
    return sequence


def test_a_request_drafts_from_others_of_its_tenant_that_have_not_ended() -> None:
    drafter = PromptLookup(OutputHistory(4096))
    running = request([50, 51], 0)
    output = random.Random(2).sample(range(100, 1000), PIECE_TOKENS + 20)
    running.sequence.tokens.extend(output[: PIECE_TOKENS - 1])
    follower, stranger = request([60, *output[3:6]], 1), request([60, *output[3:6]], 2, scope=OTHER)
    assert drafter.propose([running, follower])[1] == Proposal(), "a piece is not full"
    running.sequence.tokens.extend(output[PIECE_TOKENS - 1 :])
    found = drafter.propose([running, follower, stranger])
    assert found[1].tokens == tuple(output[6:10])
    assert found[1].kind == "suffix"
    assert found[2] == Proposal()


def test_an_output_that_was_taken_in_pieces_is_found_as_if_it_had_been_taken_whole() -> None:
    rng = random.Random(3)
    for _ in range(20):
        outputs = [[rng.randrange(60) for _ in range(rng.choice([5, 100, 700]))] for _ in range(3)]
        whole, pieces = OutputHistory(1 << 14), OutputHistory(1 << 14)
        sequences = [grown(pieces, number, [7]) for number in range(len(outputs))]
        while any(outputs[each.id][each.num_generated :] for each in sequences):  # they run at the same time
            sequence = rng.choice(sequences)
            sequence.tokens.extend(outputs[sequence.id][sequence.num_generated :][: rng.randrange(1, 200)])
            pieces.grow(sequence)
            pieces.settle(rng.choice([0, 10, 1000]))
        for sequence in sequences:
            pieces.end(sequence)
            whole.add(tokens_of(outputs[sequence.id]), SHARED)
        for made in (whole, pieces):
            made.settle(1 << 20)
        assert not pieces._growing
        kept = sorted(tokens.tolist() for _, tokens in pieces.outputs())
        assert kept == sorted(output for output in outputs if len(output) > 2)
        for output in outputs:
            for _ in range(20):
                place = rng.randrange(2, len(output))
                last = tokens_of(output[max(0, place - LONGEST_MATCH) : place])
                expected = whole.find(last, SHARED, 8, longer_than=0)
                match = pieces.find(last, SHARED, 8, longer_than=0)
                assert (match is None) == (expected is None)
                if match is not None and expected is not None:
                    assert match.num_tokens == expected.num_tokens
                    assert any(
                        output[at : at + len(match.copied)] == list(match.copied)
                        for output in outputs
                        for at in range(len(output))
                    )


def test_what_continues_a_piece_is_copied_across_its_end() -> None:
    made = OutputHistory(4096)
    output = random.Random(4).sample(range(1000), 2 * PIECE_TOKENS + 10)
    sequence = grown(made, 0, [2000])
    for count in (PIECE_TOKENS, PIECE_TOKENS, 10):
        sequence.tokens.extend(output[sequence.num_generated :][:count])
        made.grow(sequence)
    made.end(sequence)
    made.settle(1 << 20)
    for place in range(3, len(output)):
        match = made.find(tokens_of(output[max(0, place - LONGEST_MATCH) : place]), SHARED, 8, longer_than=0)
        assert match == Match(tuple(output[place : place + 8]), min(place, LONGEST_MATCH))


def test_pieces_of_a_small_window_are_lost_in_order_and_no_note_of_them_stays() -> None:
    rng = random.Random(5)
    made = OutputHistory(1024)
    sequences = [grown(made, number, [7]) for number in range(3)]
    for _ in range(200):
        sequence = rng.choice(sequences)
        sequence.tokens.extend([rng.randrange(50) for _ in range(rng.randrange(300))])
        made.grow(sequence)
        made.settle(rng.choice([50, 500]))
        made.find(sequence.tokens, SHARED, 8, longer_than=0)
        assert len(made._continued) <= 2 * 1024 // PIECE_TOKENS + 2
    assert sum(len(tokens) for _, tokens in made.outputs()) <= 1024
    assert len(made._waiting) == 0


def test_a_private_request_leaves_no_piece() -> None:
    made = OutputHistory(1024)
    sequence = grown(made, 0, [7], scope=prefix_scope(_ROOT, shared=False))
    sequence.tokens.extend(range(500))
    made.grow(sequence)
    made.end(sequence)
    made.settle(1000)
    assert len(made) == 0
