"""Traces of requests: when each arrived, and its body, or the lengths that a body is made from.

- `mooncake`: lines {"timestamp": ms, "input_length": 758, "output_length": 50, "hash_ids": [0, 1]}; prompts share
  the blocks whose ids are equal
- `azure`: CSV lines 2023-11-16 18:17:03.9799600,4808,10 below TIMESTAMP,ContextTokens,GeneratedTokens; prompts share
  nothing
- `burstgpt`: CSV lines 5,ChatGPT,472,18,490,Conversation log below Timestamp,Model,Request tokens,Response tokens,...;
  seconds; prompts share nothing
- `aibrix`: lines {"timestamp": ms, "requests": [{"prompt_length": 101, "output_length": 20, "session_id": 0}]}; prompts
  share nothing
- `log`: lines {"timestamp": seconds or ISO time, "body": {...}}, with bodies of /v1/completions or /v1/chat/completions

Mooncake: https://github.com/kvcache-ai/Mooncake, FAST25-release/traces.
Azure: https://github.com/Azure/AzurePublicDataset, AzureLLMInferenceDataset2023 and 2024.
BurstGPT: https://github.com/HPMLL/BurstGPT. AIBrix: https://github.com/vllm-project/aibrix, benchmarks/generator.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt, PositiveInt, ValidationError, model_validator

from ingot.errors import DataError

Format = Literal["mooncake", "azure", "burstgpt", "aibrix", "log"]
Json = dict[str, Any]
Tokens = NDArray[np.int64]

MOONCAKE_BLOCK_TOKENS = 512
_FIRST_TOKEN = 3  # vocabularies often begin with special tokens
_KEPT_BLOCKS = 65536
_OF_A_LINE = 1  # begins the seeds of tokens that no other prompt has


class TraceError(DataError):
    """A trace that cannot be read; the message names file and line."""


@dataclass(frozen=True)
class RequestLengths:
    """Tokens of a prompt and of its output; `blocks` has an id for each block of the prompt, where they are known."""

    line: int
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Arrival:
    """A request of a trace: seconds since the first request, and its body or its lengths."""

    seconds: float
    content: RequestLengths | Json


class _MooncakeRow(BaseModel):
    timestamp: float = Field(ge=0, allow_inf_nan=False)
    input_length: PositiveInt
    output_length: NonNegativeInt
    hash_ids: list[NonNegativeInt]

    @model_validator(mode="after")
    def _has_an_id_per_block(self) -> Self:
        needed = -(-self.input_length // MOONCAKE_BLOCK_TOKENS)
        if len(self.hash_ids) != needed:
            raise ValueError(
                f"hash_ids has {len(self.hash_ids)} ids for an input_length of {self.input_length}; "
                f"it must have {needed}, one for each {MOONCAKE_BLOCK_TOKENS} tokens"
            )
        return self

    def arrivals(self, line: int) -> Iterator[Arrival]:
        blocks = tuple(self.hash_ids)
        yield Arrival(self.timestamp / 1000, RequestLengths(line, self.input_length, self.output_length, blocks))


class _AzureRow(BaseModel):
    time: datetime = Field(alias="TIMESTAMP")
    prompt_tokens: NonNegativeInt = Field(alias="ContextTokens")
    output_tokens: NonNegativeInt = Field(alias="GeneratedTokens")

    def arrivals(self, line: int) -> Iterator[Arrival]:
        yield Arrival(_seconds_of(self.time), RequestLengths(line, self.prompt_tokens, self.output_tokens))


class _BurstGptRow(BaseModel):
    seconds: float = Field(alias="Timestamp", ge=0, allow_inf_nan=False)
    prompt_tokens: NonNegativeInt = Field(alias="Request tokens")
    output_tokens: NonNegativeInt = Field(alias="Response tokens")

    def arrivals(self, line: int) -> Iterator[Arrival]:
        yield Arrival(self.seconds, RequestLengths(line, self.prompt_tokens, self.output_tokens))


class _AibrixRequest(BaseModel):
    prompt_length: PositiveInt
    output_length: NonNegativeInt


class _AibrixRow(BaseModel):
    timestamp: float = Field(ge=0, allow_inf_nan=False)
    requests: list[_AibrixRequest]

    def arrivals(self, line: int) -> Iterator[Arrival]:
        for each in self.requests:
            yield Arrival(self.timestamp / 1000, RequestLengths(line, each.prompt_length, each.output_length))


class _LogRow(BaseModel):
    timestamp: FiniteFloat | datetime
    body: Json

    @model_validator(mode="after")
    def _has_a_prompt(self) -> Self:
        if not {"prompt", "messages"} & self.body.keys():
            raise ValueError(f"body has the keys {list(self.body)}; it must have prompt or messages")
        return self

    def arrivals(self, line: int) -> Iterator[Arrival]:
        yield Arrival(_seconds_of(self.timestamp), self.body)


_Row = _MooncakeRow | _AzureRow | _BurstGptRow | _AibrixRow | _LogRow
_ROWS: dict[str, type[_Row]] = {
    "mooncake": _MooncakeRow,
    "azure": _AzureRow,
    "burstgpt": _BurstGptRow,
    "aibrix": _AibrixRow,
    "log": _LogRow,
}
_CSV = ("azure", "burstgpt")
FORMATS: tuple[Format, ...] = get_args(Format)


def _seconds_of(time: float | datetime) -> float:
    """Seconds since 1970 of a time; one without a zone is UTC, whatever the zone of this machine."""
    if isinstance(time, datetime):
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return time


def read_trace(path: Path, kind: Format | None = None, limit: int | None = None) -> tuple[Format, list[Arrival]]:
    """The trace's format, by default found from its first line, and its first `limit` requests, sorted by time."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
            number, first = next(lines, (0, ""))
            if not number:
                raise TraceError(f"{path} has no requests")
            kind = kind or _format_of(first, f"{path}:{number}")
            is_csv = kind in _CSV
            rows = _csv_rows(first, lines) if is_csv else chain([(number, first)], lines)
            arrivals = list(islice(_arrivals(path, kind, rows), limit))
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not UTF-8 text: {error}") from None
    if not arrivals:
        raise TraceError(f"{path} has no requests")
    arrivals.sort(key=lambda each: each.seconds)  # logs are often written when requests end
    start = arrivals[0].seconds
    return kind, [Arrival(each.seconds - start, each.content) for each in arrivals]


def _format_of(line: str, place: str) -> Format:
    if "ContextTokens" in line.split(","):
        return "azure"
    if "Response tokens" in line.split(","):
        return "burstgpt"
    try:
        keys = json.loads(line).keys()
    except (ValueError, AttributeError):
        keys = ()
    if "body" in keys:
        return "log"
    if "hash_ids" in keys:
        return "mooncake"
    if "requests" in keys:
        return "aibrix"
    raise TraceError(
        f"{place}: not a known trace: {line.strip()[:80]!r}; it must begin with a Mooncake line (timestamp, "
        "input_length, output_length, hash_ids), the header of an Azure CSV (TIMESTAMP,ContextTokens,GeneratedTokens) "
        "or of a BurstGPT CSV (Timestamp,Model,Request tokens,Response tokens), a line of AIBrix (timestamp, "
        "requests), or a line of a log (timestamp, body)"
    )


def _csv_rows(header: str, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, Json]]:
    names = header.strip().split(",")
    for number, line in lines:
        yield number, dict(zip(names, line.strip().split(","), strict=False))


def _arrivals(path: Path, kind: Format, rows: Iterable[tuple[int, str | Json]]) -> Iterator[Arrival]:
    model = _ROWS[kind]
    for number, row in rows:
        try:
            read = model.model_validate_json(row) if isinstance(row, str) else model.model_validate(row)
        except ValidationError as error:
            raise TraceError(f"{path}:{number}: not a line of the format {kind}: {_reason(error)}") from None
        yield from read.arrivals(number)


def _reason(error: ValidationError) -> str:
    found = error.errors()[0]
    where = ".".join(str(each) for each in found["loc"])
    value = "" if found["type"] in ("missing", "value_error") else f" is {str(found['input']).strip()[:80]!r}"
    return f"{where}{value}: {found['msg']}" if where else found["msg"]


@dataclass(frozen=True)
class Prompts:
    """Makes bodies of /v1/completions from lengths.

    scale           of prompts and outputs: 1/32 makes 16 tokens of a Mooncake block
    context_tokens  prompts are cut so that prompt and output fit; None: no bound
    vocab_size      token ids are below it
    ignore_eos      set the field of vLLM's API that makes outputs as long as in the trace
    """

    scale: float = 1.0
    context_tokens: int | None = None
    vocab_size: int = 1000
    ignore_eos: bool = True

    def lengths(self, lengths: RequestLengths) -> RequestLengths:
        """RequestLengths in the model's size."""
        size, output = self.block_tokens, max(1, round(lengths.output_tokens * self.scale))
        # A prompt of blocks has whole blocks of whole tokens, so that shared prefixes stay aligned.
        scale = size / MOONCAKE_BLOCK_TOKENS if lengths.blocks else self.scale
        prompt = max(1, round(lengths.prompt_tokens * scale))
        if self.context_tokens:
            output = min(output, max(1, self.context_tokens // 2))
            prompt = min(prompt, self.context_tokens - output)
        return RequestLengths(lengths.line, prompt, output, lengths.blocks[: -(-prompt // size)])

    @property
    def block_tokens(self) -> int:
        """Tokens of a block after scaling."""
        return max(1, round(MOONCAKE_BLOCK_TOKENS * self.scale))

    def is_cut(self, lengths: RequestLengths) -> bool:
        """Report if the context does not hold these lengths."""
        return self.lengths(lengths) != Prompts(self.scale).lengths(lengths)

    def body(self, lengths: RequestLengths) -> Json:
        """A body with these lengths, after scaling."""
        fitted = self.lengths(lengths)
        body = {"prompt": self._token_ids(fitted), "max_tokens": fitted.output_tokens, "temperature": 0}
        return body | ({"ignore_eos": True} if self.ignore_eos else {})

    def _token_ids(self, fitted: RequestLengths) -> list[int]:
        if not fitted.blocks:
            return list(tokens_of_line(fitted.line, fitted.prompt_tokens, self.vocab_size).tolist())
        size, vocab = self.block_tokens, self.vocab_size
        ids = [token for block in fitted.blocks for token in block_token_ids(block, size, vocab)]
        return ids[: fitted.prompt_tokens]


def repeated_tokens(lengths: Iterable[RequestLengths], block_tokens: int) -> int:
    """Prompt tokens that a prefix cache without limits would reuse: those in leading blocks of an earlier prompt."""
    seen, repeated = set[int](), 0
    for each in lengths:
        leading = next((at for at, block in enumerate(each.blocks) if block not in seen), len(each.blocks))
        repeated += min(leading * block_tokens, each.prompt_tokens)
        seen.update(each.blocks)
    return repeated


def block_token_ids(block: int, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    """Tokens that follow from a block's id, so that equal ids make equal prefixes."""
    return tuple(block_tokens(block, num_tokens, vocab_size).tolist())


@lru_cache(_KEPT_BLOCKS)
def block_tokens(block: int, num_tokens: int, vocab_size: int) -> Tokens:
    """The same as an array, which callers do not change."""
    return _random_tokens(block, num_tokens, vocab_size)


def tokens_of_line(line: int, num_tokens: int, vocab_size: int) -> Tokens:
    """Tokens of a prompt that shares none with those of other lines."""
    return _random_tokens((_OF_A_LINE, line), num_tokens, vocab_size)


def _random_tokens(seed: int | tuple[int, int], num_tokens: int, vocab_size: int) -> Tokens:
    return np.random.default_rng(seed).integers(_FIRST_TOKEN, vocab_size, num_tokens)
