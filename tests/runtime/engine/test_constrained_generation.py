"""Requests with constraints: valid outputs, and the same tokens with every feature that must not change one."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

from ingot.errors import RequestError, RequestFailed
from ingot.runtime.asking.outputs import Completion
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.constraints import Constraint
from ingot.runtime.constraints.matcher import ConstraintFailed, Matcher
from ingot.runtime.engine.engine import Engine
from ingot.runtime.hosting.async_engine import AsyncEngine
from ingot.runtime.requests.beam_search import BeamParams
from ingot.runtime.speculation.drafter import Drafter
from ingot.runtime.speculation.length_control import LengthControl
from ingot.runtime.speculation.prompt_lookup import PromptLookup
from ingot.runtime.speculation.speculator import Speculator
from tests.each_case import each_case
from tests.runtime.engines import demo_tokenizer, sentencepiece_tokenizer, text_engine
from tests.simulators.fake_drafters import RandomDrafter
from tests.simulators.fake_executor import FakeExecutor
from tests.simulators.pipelined_executor import FakePipelinedExecutor

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog", "a much longer name of a kind"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "tame": {"type": "boolean"},
    },
    "required": ["kind", "ages", "tame"],
    "additionalProperties": False,
}
JSON = Constraint.json_schema(SCHEMA)
# The fake model has no opinion: without a bias most of its output would be white space between two values.
BLANKS = {token: -100.0 for token in range(4096) if (demo_tokenizer().token(token) or "x").strip("ĠĊĉč") == ""}
PARAMS = SamplingParams(max_tokens=90, temperature=1.0, seed=5, constraint=JSON, logit_bias=BLANKS)
PROMPT = 'def read_file(path):\n    """Return the text of a file, without its last line."""\n'
ENDS = (0,)
VOCAB = demo_tokenizer().vocab_size


def variants() -> list[SamplingParams]:
    """Parameters that take each path of the sampler."""
    plain = [replace(PARAMS, seed=seed) for seed in range(6)]
    return [
        *plain,
        replace(PARAMS, logprobs=2),
        replace(PARAMS, temperature=0.0, repetition_penalty=1.1, logit_bias={}),
        replace(PARAMS, logit_bias={}, top_k=5, constraint=Constraint.choice(["yes", "no", "maybe so"])),
        replace(PARAMS, logit_bias={}, constraint=Constraint.regex(r"[a-c]{3,9}(-\d\d)?")),
        replace(
            PARAMS, logit_bias={}, temperature=0.0, constraint=Constraint.grammar('start: "(" start ")" | "x" "y"?')
        ),
        SamplingParams(max_tokens=30, temperature=1.0, seed=3),
    ]


def facts(completion: Completion) -> tuple[object, ...]:
    return completion.token_ids, completion.text, completion.finish_reason, completion.stop_reason, completion.logprobs


@pytest.fixture(scope="module")
def plain() -> list[Completion]:
    """Each variant alone on an engine without speculation, small steps or a small pool."""
    with text_engine(eos_token_ids=ENDS) as engine:
        return [engine.generate(PROMPT, params) for params in variants()]


def test_outputs_are_what_their_constraint_says(plain: list[Completion]) -> None:
    for completion, params in zip(plain, variants(), strict=True):
        assert completion.error is None
        if params.constraint == JSON and completion.finish_reason == "stop":
            jsonschema.validate(json.loads(completion.text), SCHEMA)
    assert sum(one.finish_reason == "stop" for one in plain) >= len(plain) - 2
    assert plain[8].text in {"yes", "no", "maybe so"}


def test_a_text_that_is_complete_ends_without_an_end_token(plain: list[Completion]) -> None:
    assert plain[0].text.endswith("}")
    assert plain[0].stop_reason is None
    assert 0 not in plain[0].token_ids


@each_case("executor", [FakeExecutor, FakePipelinedExecutor])
@each_case("drafter", ["none", "lookup", "random"])
def test_no_feature_changes_a_token(plain: list[Completion], executor: Any, drafter: str) -> None:
    """All at once in a pool that preempts, with drafts, twice so that prompts are cached."""
    drafters: dict[str, Drafter] = {"lookup": PromptLookup(), "random": RandomDrafter(VOCAB, 1)}
    made, control = drafters.get(drafter), LengthControl(adapts=False)
    speculator = Speculator(made, vocab_size=VOCAB, num_draft_tokens=4, control=control) if made else None
    fake = executor(vocab_size=VOCAB, eos_token_ids=ENDS, num_blocks=32, block_tokens=4, max_batch_tokens=24)
    with Engine(fake, demo_tokenizer(), speculator=speculator) as engine:
        accepted = 0
        for _ in range(2):
            found = engine.generate([PROMPT] * len(plain), variants())
            accepted += sum(one.metrics.num_accepted_tokens for one in found)
            engine.check()
            assert list(map(facts, found)) == list(map(facts, plain))
        assert engine.metrics().num_preemptions
        assert engine.metrics().prefix_hit_tokens
        if speculator:
            counters = speculator.counters.snapshot()
            assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
            assert accepted == counters.num_accepted_tokens


@each_case("adapts", [False, True])
def test_forced_drafts_of_a_sentencepiece_vocabulary_change_no_token(adapts: bool) -> None:
    tokenizer = sentencepiece_tokenizer()

    def completions(made: Speculator | None) -> list[tuple[object, ...]]:
        fake = FakeExecutor(vocab_size=tokenizer.vocab_size, eos_token_ids=(2,))
        with Engine(fake, tokenizer, speculator=made) as engine:
            params = [replace(PARAMS, seed=seed, logit_bias={}) for seed in range(4)]
            return [facts(one) for one in engine.generate(["one two"] * 4, params)]

    control = LengthControl(adapts=adapts)
    speculator = Speculator(PromptLookup(), vocab_size=tokenizer.vocab_size, num_draft_tokens=4, control=control)
    assert completions(speculator) == completions(None)
    assert adapts or speculator.counters.snapshot().num_accepted_tokens


class UnspellableTexts(Matcher):
    """Reports tokens as forced that the constraint does not allow, as a tokenizer may spell them."""

    def forced(self) -> list[int]:
        """Allowed tokens, then one that never is."""
        return [*super().forced(), ENDS[0]] * 2


def test_forced_drafts_are_cut_where_the_constraint_forbids_them(
    plain: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.runtime.constraints.compiler.Matcher", UnspellableTexts)
    speculator = Speculator(PromptLookup(), vocab_size=VOCAB, control=LengthControl(adapts=False))
    fake = FakeExecutor(vocab_size=VOCAB, eos_token_ids=ENDS)
    with Engine(fake, demo_tokenizer(), speculator=speculator) as engine:
        assert list(map(facts, engine.generate([PROMPT] * len(plain), variants()))) == list(map(facts, plain))
    assert speculator.counters.snapshot().num_accepted_tokens


def test_choices_are_requests_of_their_own() -> None:
    with text_engine(eos_token_ids=ENDS) as engine:
        result = engine.generate(PROMPT, replace(PARAMS, n=4))
        for choice in result.choices:
            alone = engine.generate(PROMPT, replace(PARAMS, seed=choice.seed))
            assert facts(choice) == facts(alone)
        best = engine.generate(PROMPT, replace(PARAMS, best_of=4, n=1))
        assert best.text in {choice.text for choice in result.choices}


def test_beams_are_the_best_texts_of_the_language() -> None:
    names = ["alpha", "beta", "gamma", "delta", "alphabet"]
    params = BeamParams(width=8, max_tokens=12, num_return=4, length_penalty=0.0, constraint=Constraint.choice(names))
    with text_engine(eos_token_ids=ENDS) as engine:
        result = engine.beam_search(PROMPT, params)
        assert all(choice.text in names for choice in result.choices)
        assert result.choices[0].stop_reason == 0
        narrow = engine.beam_search(PROMPT, replace(params, width=1, num_return=1))
        greedy = engine.generate(PROMPT, SamplingParams(max_tokens=12, constraint=params.constraint))
        assert narrow.text == greedy.text
        json_result = engine.beam_search(PROMPT, BeamParams(width=3, max_tokens=200, constraint=JSON))
        if json_result.finish_reason == "stop":
            jsonschema.validate(json.loads(json_result.text), SCHEMA)
    with pytest.raises(RequestError, match="ignore_eos is set"):
        BeamParams(constraint=JSON, ignore_eos=True)


def test_log_probabilities_are_the_models_own() -> None:
    with text_engine(eos_token_ids=ENDS) as engine:
        done = engine.generate(PROMPT, replace(PARAMS, logprobs=1), keep_logits=True)
    assert done.logits is not None
    assert done.logprobs is not None
    for row, token in zip(done.logits, done.logprobs, strict=True):
        wide = row.astype(np.float64)
        assert token.logprob == pytest.approx(wide[token.token_id] - np.log(np.exp(wide).sum()))
        assert token.top[0].token_id == int(row.argmax())


def test_a_bias_cannot_allow_what_the_constraint_forbids() -> None:
    token = demo_tokenizer().encode("(", add_special_tokens=False)[0]
    with text_engine(eos_token_ids=ENDS) as engine:
        done = engine.generate(PROMPT, replace(PARAMS, logit_bias={**dict(PARAMS.logit_bias), token: 100}))
        assert token not in done.token_ids


def test_end_tokens_count_only_where_the_text_is_complete() -> None:
    digits = Constraint.regex(r"\d{1,400}")
    comma = demo_tokenizer().encode(",", add_special_tokens=False)[0]
    params = SamplingParams(max_tokens=40, constraint=digits, logit_bias={0: 100, comma: 99})
    with text_engine(eos_token_ids=ENDS) as engine:
        ended = engine.generate(PROMPT, params)
        assert ended.token_ids[-1] == 0
        assert len(ended.token_ids) == 2, "one token of digits, and the end"
        goes_on = engine.generate(PROMPT, replace(params, ignore_eos=True))
        assert (goes_on.finish_reason, len(goes_on.token_ids)) == ("length", 40)
        stopped = engine.generate(PROMPT, replace(params, ignore_eos=True, stop_token_ids=[comma]))
        assert (stopped.stop_reason, len(stopped.token_ids)) == (comma, 2)
        whole = engine.generate(PROMPT, replace(PARAMS, ignore_eos=True))
        assert json.loads(whole.text)
        assert whole.finish_reason == "stop"


def test_a_stop_string_ends_a_constrained_output_too() -> None:
    with text_engine(eos_token_ids=ENDS) as engine:
        done = engine.generate(PROMPT, replace(PARAMS, stop="ages"))
    assert done.stop_reason == "ages"
    assert "ages" not in done.text


def test_a_text_that_is_complete_with_its_last_token_has_stopped() -> None:
    with text_engine(eos_token_ids=ENDS) as engine:
        full = engine.generate(PROMPT, PARAMS)
        count = len(full.token_ids)
        assert engine.generate(PROMPT, replace(PARAMS, max_tokens=count)).finish_reason == "stop"
        assert engine.generate(PROMPT, replace(PARAMS, max_tokens=count - 1)).finish_reason == "length"


def test_a_constraint_that_fails_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    consume = Matcher.consume

    def failing(self: Matcher, token_id: int) -> None:
        consume(self, token_id)
        raise ConstraintFailed("the parser is full")

    params = [replace(PARAMS, max_tokens=8), SamplingParams(max_tokens=8)]
    with text_engine(eos_token_ids=ENDS) as engine:
        expected = engine.generate(PROMPT, params[1]).token_ids
        monkeypatch.setattr(Matcher, "consume", failing)
        with pytest.raises(RequestFailed, match="cannot be followed further \\(the parser is full\\)") as failed:
            engine.generate([PROMPT] * 2, params)
        engine.check()
    assert failed.value.completions[1].token_ids == expected


async def _served(engine: AsyncEngine, plain: list[Completion]) -> None:
    async with engine:
        assert facts(await engine.generate(PROMPT, PARAMS)) == facts(plain[5])
        with pytest.raises(RequestError, match="not supported"):
            await engine.generate(PROMPT, SamplingParams(constraint=Constraint.json_schema({"not": {}})))
        result = await engine.beam_search(PROMPT, BeamParams(constraint=Constraint.choice(["a", "b"])))
        assert result.text in "ab"
        aborted = engine.stream(PROMPT, PARAMS, options=RequestOptions(prefix_cache=False))
        await anext(aborted)
        await aborted.aclose()
        assert engine.metrics().num_failed_requests == 0


def test_the_async_engine_compiles_in_its_threads(plain: list[Completion]) -> None:
    asyncio.run(_served(AsyncEngine(text_engine(eos_token_ids=ENDS)), plain))
