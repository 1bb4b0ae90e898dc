"""Options of the measurements. Those with a meaning (Doc) are keys of a recipe, too."""

from dataclasses import dataclass
from typing import Annotated

from ingot.errors import UsageError
from ingot.options import Doc, Items, Range, check_options

MIN_WINDOWS = 2
MIN_PROMPTS = 2
# Upper bounds are far above what is useful; they exist so that a slip is refused before it fills a disk or a memory.
MOST_TOKENS = 1 << 24
MOST_SECONDS = 86_400

_TOKENS = Range(ge=1, le=MOST_TOKENS)
_SECONDS = Range(gt=0, le=MOST_SECONDS)


@dataclass(frozen=True)
class AccuracyOptions:
    """Amount of text to score, and the windows.

    tokens         tokens to predict, rounded down to whole windows
    window_tokens  input tokens and predicted tokens per window
    seed           seed of the bootstrap
    """

    tokens: int = 61_440
    window_tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if self.window_tokens < 1:
            raise UsageError(f"evaluation window_tokens is {self.window_tokens}; it must be 1 or more")
        if self.tokens < MIN_WINDOWS * self.window_tokens:
            raise UsageError(
                f"evaluation tokens is {self.tokens}, less than {MIN_WINDOWS} windows of {self.window_tokens}; "
                f"set tokens to {MIN_WINDOWS * self.window_tokens} or more, or window_tokens lower"
            )

    @property
    def num_windows(self) -> int:
        """Number of windows."""
        return self.tokens // self.window_tokens

    @property
    def text_tokens(self) -> int:
        """Number of text tokens that the windows need."""
        return self.num_windows * self.window_tokens + 1


@dataclass(frozen=True)
class GenerationOptions:
    """Settings of the generations to compare.

    prompts        number of prompts
    prompt_tokens  tokens of each; fewer for a context that has no room for four times as many
    output_tokens  tokens that each is continued by; fewer where the context ends
    """

    prompts: int = 16
    prompt_tokens: int = 64
    output_tokens: int = 512

    def __post_init__(self) -> None:
        if self.prompts < MIN_PROMPTS or min(self.prompt_tokens, self.output_tokens) < 1:
            raise UsageError(
                f"generation has {self.prompts} prompts of {self.prompt_tokens} tokens and {self.output_tokens} tokens"
                f" to generate; it needs at least {MIN_PROMPTS} prompts, and 1 token of each"
            )

    def fitted(self, context_tokens: int) -> "GenerationOptions":
        """The same, shortened to a context."""
        prompt = min(self.prompt_tokens, max(1, context_tokens // 4))
        return GenerationOptions(self.prompts, prompt, min(self.output_tokens, max(1, context_tokens - prompt)))


def _levels_differ(levels: tuple[int, ...]) -> None:
    if len(set(levels)) < len(levels):
        raise ValueError(f"concurrency {list(levels)} repeats a level; remove it")


@dataclass(frozen=True)
class ServiceLevel:
    """The service-level objective: a request keeps it when all of its limits hold. None: no such limit."""

    ttft_seconds: Annotated[float | None, _SECONDS, Doc("maximum time to first token; null: any")] = None
    tpot_seconds: Annotated[float | None, _SECONDS, Doc("maximum time per output token; null: any")] = None
    e2e_seconds: Annotated[float | None, _SECONDS, Doc("maximum time to last token; null: any")] = None

    def __post_init__(self) -> None:
        check_options(self, refuse=lambda message, _: UsageError(f"latency slo {message}"))
        if not self.limits:
            raise UsageError("latency slo has no limit; give ttft_seconds, tpot_seconds or e2e_seconds")

    @property
    def limits(self) -> dict[str, float]:
        """Seconds by the name of the limited time: ttft, tpot, e2e."""
        found = {"ttft": self.ttft_seconds, "tpot": self.tpot_seconds, "e2e": self.e2e_seconds}
        return {name: seconds for name, seconds in found.items() if seconds is not None}


@dataclass(frozen=True)
class LatencyLoad:
    """The load under which latency is measured, baseline and candidate interleaved.

    A level is one concurrency of a closed loop, a run is one engine at one level in one round, and the runs of a level
    are in the order A B, B A, A B, ... Prompts are random token ids; end-of-sequence is ignored.
    """

    concurrency: Annotated[
        tuple[Annotated[int, Range(ge=1, le=4096)], ...],
        Items(1, 16, _levels_differ),
        Doc("numbers of requests kept in flight, each measured on its own"),
    ] = (1, 4)
    prompt_tokens: Annotated[int, _TOKENS, Doc("tokens per prompt")] = 128
    output_tokens: Annotated[int, Range(ge=2, le=MOST_TOKENS), Doc("tokens per output")] = 64
    requests: Annotated[int, Range(ge=1, le=100_000), Doc("requests per run")] = 8
    rounds: Annotated[int, Range(ge=2, le=10_000), Doc("least number of pairs of runs (baseline, candidate)")] = 5
    max_seconds: Annotated[
        float, _SECONDS, Doc("time after which no more rounds are added to decide the gates on latency")
    ] = 300.0
    seed: int = 0
    slo: Annotated[ServiceLevel | None, Doc("objective of goodput and of the gate slo; null for none")] = None

    def __post_init__(self) -> None:
        check_options(self, refuse=lambda message, _: UsageError(f"latency {message}"))

    @property
    def sequence_tokens(self) -> int:
        """Tokens of one request: prompt and output."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True)
class MemoryOptions:
    """How peak memory is measured: processes that load the artifact or the baseline and generate once."""

    probes: Annotated[int, Range(ge=2, le=100), Doc("processes per engine, baseline and candidate")] = 3
    prompt_tokens: Annotated[int, _TOKENS, Doc("tokens of the prompt in each")] = 64
    output_tokens: Annotated[int, _TOKENS, Doc("tokens of the output in each")] = 16

    def __post_init__(self) -> None:
        check_options(self, refuse=lambda message, _: UsageError(f"memory {message}"))
