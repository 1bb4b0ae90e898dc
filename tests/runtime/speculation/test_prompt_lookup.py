"""Prompt lookup against a search of the whole sequence, and what it drafts on known texts."""

import random
from array import array
from collections.abc import Sequence as Tokens

from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.requests.sampler import Sampler
from ingot.runtime.scheduling.sequence import Sequence
from ingot.runtime.speculation.drafter import NUM_GRADES, DraftRequest, Proposal
from ingot.runtime.speculation.output_history import LONGEST_MATCH, MOST_PLACES
from ingot.runtime.speculation.prompt_lookup import MATCH_TOKENS, PromptLookup


def request(tokens: Tokens[int], num_tokens: int = 4, number: int = 0) -> DraftRequest:
    sequence = Sequence.of(number, tokens, 100)
    return DraftRequest(sequence, Sampler(SamplingParams(), sequence.tokens), num_tokens)


def proposal(tokens: Tokens[int], num_tokens: int = 4) -> Proposal:
    return PromptLookup().propose([request(tokens, num_tokens)])[0]


def test_the_tokens_after_the_earlier_occurrence_are_copied() -> None:
    assert proposal([1, 2, 3, 4, 5, 6, 7, 1, 2]) == Proposal((3, 4, 5, 6), (0, 1, 2, 3), "lookup")


def test_the_longest_match_wins_over_the_newest() -> None:
    assert proposal([9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], 1).tokens == (3,)


def test_of_equally_long_matches_the_newest_wins() -> None:
    assert proposal([9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 1).tokens == (4,)


def test_a_copy_that_reaches_the_end_repeats_itself() -> None:
    assert proposal([5, 1, 2, 1, 2], 6).tokens == (1, 2, 1, 2, 1, 2)
    assert proposal([7, 7, 7], 4).tokens == (7, 7, 7, 7)


def test_without_an_earlier_occurrence_nothing_is_drafted() -> None:
    for tokens in ([1], [1, 2], [1, 2, 3, 4], [1, 1], [1, 2, 1]):
        assert proposal(tokens) == Proposal()


def test_grades_grow_with_the_match_and_stay_in_range() -> None:
    text = list(range(40))
    assert proposal([*text, *text], 4).grades == (NUM_GRADES - 1,) * 4
    assert proposal([1, 2, 3, 0, 2, 3], 3).grades == (0, 1, 2)


def searched(tokens: list[int], count: int) -> tuple[int, ...]:
    """The rule of the module's docstring, by a search of all places."""
    places = [
        place
        for place in range(len(tokens) - 1, MATCH_TOKENS - 1, -1)
        if tokens[place - MATCH_TOKENS : place] == tokens[-MATCH_TOKENS:]
    ]
    best, longest = 0, 0
    for place in places[:MOST_PLACES]:
        most = min(place, LONGEST_MATCH)
        length = next((n for n in range(most) if tokens[place - 1 - n] != tokens[-1 - n]), most)
        if length > longest:
            best, longest = place, length
    copy = list(tokens)
    for place in range(best, best + count):
        copy.append(copy[place])
    return tuple(copy[len(tokens) :]) if longest else ()


def test_an_index_that_grows_with_its_sequence_finds_what_a_search_finds() -> None:
    rng = random.Random(0)
    num_found = 0
    for vocab in (2, 4, 12):
        drafter = PromptLookup()
        asked = [request([rng.randrange(vocab)], number=number) for number in range(4)]
        for _ in range(120):
            for each in asked:
                each.sequence.tokens.extend(rng.randrange(vocab) for _ in range(rng.randrange(4)))
            proposals = drafter.propose(asked)
            for each, found in zip(asked, proposals, strict=True):
                assert found.tokens == searched(each.sequence.tokens.tolist(), each.num_tokens)
                num_found += bool(found.tokens)
    assert num_found > 500


def test_what_is_kept_for_a_sequence_is_dropped_with_it() -> None:
    drafter = PromptLookup()
    requests = [request(array("q", [1, 2, 3]), number=number) for number in range(3)]
    drafter.propose(requests)
    drafter.forget(requests[1].sequence)
    drafter.forget(requests[1].sequence)
    assert set(drafter._indexes) == {0, 2}
    drafter.close()
    assert not drafter._indexes
