"""The requests of a verification: real prompts with the lengths and parameters where errors were found before.

Lengths are around block boundaries (an exact multiple, one more, one less), prompts share beginnings, one continues the
output of another as a conversation does, one repeats itself. Greedy, seeded, penalized and biased sampling are all
there, log-probabilities, a stop string in the middle of an output, and one after which drafts are left.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from ingot.errors import DataError
from ingot.runtime.asking.outputs import Completion
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.engine import Engine
from ingot.runtime.requests.sampler import choice_params
from ingot.runtime.speculation.prompt_lookup import NGramIndex, copied
from ingot.runtime.text.tokenizer import Tokenizer
from ingot.validation.verify.adapters import NAMES, load_adapters
from ingot.validation.verify.constraints import PATTERN, SCHEMA, sampled_constraint
from ingot.validation.verify.subject import Subject

NUM_CHOICES = 3
NUM_DRAFTS = 4  # most drafts of a request in a step
_LEAST_OUTPUT, _MOST_OUTPUT = 24, 96
_OUTPUT_BLOCKS = 3
_LONG_BLOCKS = 10
_SPLIT_TOKENS = 512  # tokens that attention computes at once
_MOST_QUICK_TOKENS = 1024  # limit of a prompt in the quick form
_REPEATS = 4
_TEMPERATURE = 0.8
# Tokens of an answer in JSON, if the context has room for them: enough objects to copy drafts from.
_JSON_TOKENS = 128
_JSON_TEMPERATURE = 1.3  # objects with other keys
_STOP_CHARACTERS = 3
_BIAS = 50.0  # an answer of two tokens, which any model copies now and then, and not always
MODEL_TEXTS = 8  # enough to choose windows from
_FLAT = 1.0  # temperature of the model's own text


@dataclass(frozen=True)
class VerifiedRequest:
    """One request, by a name that says what is special about it.

    is_large  whether it is left out where the KV pool is small, since one with room for it has room for the others
              together, and where it would take all the room of small steps
    """

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    adapter: str | None = None
    is_large: bool = False

    @property
    def num_tokens(self) -> int:
        """Most tokens that it has in the KV pool at its end."""
        return len(self.prompt) + self.params.max_tokens - 1


@dataclass(frozen=True)
class Expected:
    """A request and what the plain path answered; `others` to the same with the seeds of choices 1 and following."""

    request: VerifiedRequest
    completion: Completion
    others: tuple[Completion, ...] = ()

    def choice(self, index: int) -> "Expected":
        """Return the expected answer of choice `index` of the request."""
        if index == 0:
            return Expected(self.request, self.completion)
        return Expected(replace(self.request, name=f"{self.request.name} choice {index}"), self.others[index - 1])


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens that fit a subject.

    block    of a block
    output   of outputs
    longest  of the longest prompt, but for the large one
    large    of one prompt beyond attention's window and split, more than most engines have in a step; 0: without
    """

    block: int
    output: int
    longest: int
    large: int = 0

    @classmethod
    def of(cls, subject: Subject, quick: bool) -> "Lengths":
        """Outputs grow over three blocks, so that sequences run out of blocks while they decode; over two if `quick`.

        With side state always over three: a preempted sequence then resumes at its prompt's end, and others must grow
        over that too before it is a swap.
        """
        block, context = subject.kv.block_tokens, subject.model.context_tokens
        num_blocks = _OUTPUT_BLOCKS - (quick and not subject.kv.state_bytes)
        output = min(_MOST_OUTPUT, max(_LEAST_OUTPUT, num_blocks * block))
        output = max(1, min(output, context // 4))
        longest = min(_LONG_BLOCKS * block + 5, subject.max_batch_tokens, context - 2 * output - 2)
        return cls(block, output, max(1, longest), _large(subject, output, quick))

    def prompt(self, num_tokens: int) -> int:
        """Return this many tokens, or as many as fit a prompt."""
        return max(1, min(num_tokens, self.longest))


def _large(subject: Subject, output: int, quick: bool) -> int:
    """Tokens of the large prompt: a few blocks past the window, or past a split where that would be too long."""
    most = subject.model.context_tokens - output
    if quick:
        most = min(most, _MOST_QUICK_TOKENS)
    if not subject.raises_batch_tokens:
        most = min(most, subject.max_batch_tokens)  # the plain path computes a prompt in one step
    window = max(_SPLIT_TOKENS, *(layer.window for layer in subject.kv.layers))
    past = 2 * subject.kv.block_tokens + 3
    return next((edge + past for edge in (window, _SPLIT_TOKENS) if edge + past <= most), 0)


def make_requests(tokens: Sequence[int], lengths: Lengths, seed: int, quick: bool) -> list[VerifiedRequest]:
    """The requests whose prompts are windows of real tokens; those that need outputs are added by `with_outputs`.

    DataError when there are fewer tokens than the longest prompt.
    """
    if len(tokens) < 2 * lengths.longest:
        raise DataError(
            f"the prompts' text has {len(tokens)} tokens; {2 * lengths.longest} are needed. Give a longer text"
        )
    rng = np.random.default_rng(seed)
    block, output = lengths.block, lengths.output

    def window(num_tokens: int) -> tuple[int, ...]:
        start = int(rng.integers(0, len(tokens) - num_tokens + 1))
        return tuple(map(int, tokens[start : start + num_tokens]))

    def seeded(**values: Any) -> SamplingParams:
        fields: dict[str, Any] = {"temperature": _TEMPERATURE, "seed": int(rng.integers(1 << 32)), **values}
        return SamplingParams(max_tokens=output, ignore_eos=True, **fields)

    greedy = SamplingParams(max_tokens=output, ignore_eos=True)
    whole = window(lengths.prompt(4 * block))
    shared = whole[: max(1, len(whole) - block)]
    repeated = window(max(1, lengths.prompt(6 * block + 3) // _REPEATS)) * _REPEATS
    requests = [
        VerifiedRequest("exact-blocks", whole, replace(greedy, logprobs=2)),
        VerifiedRequest("one-more", (*shared, *window(block + 1)), seeded(top_k=40, logprobs=1)),
        VerifiedRequest("other-start", (*window(min(block, len(whole))), *whole[block:]), greedy),
        VerifiedRequest("one-less", whole[:-1] or whole, replace(greedy, repetition_penalty=1.3)),
        VerifiedRequest("repetitive", repeated, greedy),
        VerifiedRequest("long", window(lengths.longest), seeded(top_p=0.95)),
        VerifiedRequest("one-token", window(1), seeded(presence_penalty=0.4, frequency_penalty=0.2, min_p=0.02)),
        VerifiedRequest("two-tokens", whole[:block], seeded(logit_bias={int(whole[0]): _BIAS, int(whole[-1]): _BIAS})),
    ]
    if not quick:
        ends = SamplingParams(max_tokens=output, temperature=_TEMPERATURE, seed=seed, logit_bias={int(whole[0]): 2.0})
        requests.append(VerifiedRequest("may-end", window(lengths.prompt(2 * block)), ends))
    if lengths.large:
        short = replace(greedy, max_tokens=max(1, output // 4))
        text = [*tokens] * -(-lengths.large // len(tokens))
        requests.append(VerifiedRequest("large", tuple(map(int, text[-lengths.large :])), short, is_large=True))
    return requests


def with_outputs(requests: Sequence[VerifiedRequest], engine: Engine, lengths: Lengths) -> list[Expected]:
    """Answer each request alone on the plain engine, with four more that are made of these answers.

    continued    the first prompt with its answer, as the next turn of a conversation
    stop-token   the repetitive one, ended by a token from the middle of its answer
    stop-string  a request that ends at a text from the middle of its answer; left out without a tokenizer
    stop-draft   the repetitive one, ended by a text after which drafts of its step are left, so that the engine has to
                 drop them; left out without a tokenizer, or where prompt lookup has no such drafts
    """
    expected = [_answered(one, engine) for one in requests]
    first = expected[0]
    output = first.completion.token_ids
    prompt = (*first.request.prompt, *output, *first.request.prompt[:3])
    if len(prompt) <= min(engine.max_batch_tokens, engine.model.context_tokens - lengths.output):
        params = SamplingParams(max_tokens=lengths.output, ignore_eos=True)
        added = [VerifiedRequest("continued", prompt, params)]
    else:
        added = []
    repetitive = next(one for one in expected if one.request.name == "repetitive")
    middle = repetitive.completion.token_ids[len(repetitive.completion.token_ids) // 2]
    params = replace(repetitive.request.params, stop_token_ids=(middle,))
    added.append(replace(repetitive.request, name="stop-token", params=params))
    stop = _stop_string(expected[1].completion)
    if stop:
        added.append(replace(expected[1].request, name="stop-string", params=_stopping(expected[1], stop)))
    stop = _stop_among_drafts(repetitive, engine.tokenizer) if engine.tokenizer else ""
    if stop:
        added.append(replace(repetitive.request, name="stop-draft", params=_stopping(repetitive, stop)))
    return expected + [_answered(one, engine) for one in added]


def with_constraints(expected: Sequence[Expected], engine: Engine, lengths: Lengths) -> list[Expected]:
    """Answers to requests with constraints, whose prompts are those of other requests.

    json, more-json  sampled, with text that is forced, by a schema
    sampled-pattern  instead of them, where the vocabulary does not spell JSON
    pattern          greedy, with a penalty; it repeats itself, so that drafts are accepted
    """
    assert engine.tokenizer is not None  # Subject.no_constraints says so otherwise
    sampled, repetitive = expected[1].request, next(one.request for one in expected if one.request.name == "repetitive")
    constraint, names, most = sampled_constraint(engine.tokenizer, engine.model.vocab_size), ["sampled-pattern"], 0
    if constraint == SCHEMA:
        names, most = ["json", "more-json"], min(_JSON_TOKENS, engine.model.context_tokens - len(sampled.prompt) - 1)
    most = max(most, lengths.output)
    params = SamplingParams(max_tokens=most, ignore_eos=True, temperature=_JSON_TEMPERATURE, constraint=constraint)
    requests = [VerifiedRequest(name, sampled.prompt, replace(params, seed=7 + at)) for at, name in enumerate(names)]
    greedy = SamplingParams(max_tokens=lengths.output, ignore_eos=True, repetition_penalty=1.1, constraint=PATTERN)
    requests.append(VerifiedRequest("pattern", repetitive.prompt, greedy))
    return [_answered(one, engine) for one in requests]


def with_adapters(expected: Sequence[Expected], engine: Engine) -> list[Expected]:
    """Answers to the first request with one adapter, and with another: the same prompt and other tokens."""
    load_adapters(engine)
    first = expected[0].request
    return [_answered(replace(first, name=f"{first.name} with {name}", adapter=name), engine) for name in NAMES]


def _answered(request: VerifiedRequest, engine: Engine) -> Expected:
    """Answer a request, and again for each further choice; greedy choices are all equal."""

    def generate(params: SamplingParams) -> Completion:
        options = RequestOptions(adapter=request.adapter)
        return engine.generate(list(request.prompt), params, options=options, keep_logits=True)

    first = generate(request.params)
    params = choice_params(replace(request.params, n=NUM_CHOICES))[1:]
    others = (first if one.is_greedy else generate(replace(one, n=1)) for one in params)
    return Expected(request, first, tuple(others))


def _stopping(expected: Expected, stop: str) -> SamplingParams:
    return replace(expected.request.params, stop=(stop,))


def _stop_among_drafts(expected: Expected, tokenizer: Tokenizer) -> str:
    """The shortest text that ends the answer at a draft with others after it, as near to the middle as possible."""
    prompt, output = expected.request.prompt, expected.completion.token_ids
    detokenizer = tokenizer.detokenizer(prompt)
    pieces = [detokenizer.push(token) for token in output]
    middle = len(output) // 2
    for place in sorted(drafts_before_drafts(prompt, output), key=lambda place: abs(place - middle)):
        text = "".join(pieces[: place + 1])
        ends = (text[start:] for start in range(len(text) - _STOP_CHARACTERS, -1, -1))
        stop = next((end for end in ends if end not in text[:-1]), "")
        if stop and pieces[place]:  # otherwise its character goes on in the next token
            return stop
    return ""


def drafts_before_drafts(prompt: Sequence[int], output: Sequence[int]) -> Iterator[int]:
    """Places of the output that are accepted drafts, but not the last of their step, if nothing limits a step."""
    index, tokens = NGramIndex(), array("q", [*prompt, *output[:1]])
    while (done := len(tokens) - len(prompt)) < len(output):
        index.extend(tokens)
        found = index.find(tokens)
        drafts = copied(tokens, found[0], min(NUM_DRAFTS, len(output) - done - 1)) if found else ()
        pairs = zip(drafts, output[done:], strict=False)
        num_accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        yield from range(done, done + min(num_accepted, len(drafts) - 1))
        tokens.extend(output[done : done + num_accepted + 1])


def _stop_string(completion: Completion) -> str:
    """A text from the second half of an answer; empty where it has none."""
    text = completion.text
    middle = len(text) // 2
    return text[middle : middle + _STOP_CHARACTERS]


def model_tokens(engine: Engine, lengths: Lengths, seed: int) -> list[int]:
    """Tokens of the model's own text, for want of another: seeded samples as long as the longest prompt, all at once.

    No answer is compared with them, so they need not be the plain path's.
    """
    most = min(lengths.longest, engine.model.context_tokens - 1)
    params = [
        SamplingParams(max_tokens=most, temperature=_FLAT, seed=seed + number, ignore_eos=True)
        for number in range(MODEL_TEXTS)
    ]
    texts = engine.generate([[engine.model.bos_token_id or 0]] * MODEL_TEXTS, params)
    return [token for text in texts for token in text.token_ids]
