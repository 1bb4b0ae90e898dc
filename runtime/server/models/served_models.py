"""The models of a server: an engine each, found by the name of its artifact or by an alias."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ingot.artifact import Artifact
from ingot.errors import IngotError, RequestError, UsageError, near_or_all, shown, unknown
from ingot.runtime.asking.prompts import TokenIds
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.engine.metrics_export import METRICS, Value
from ingot.runtime.hosting.async_engine import AsyncEngine
from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.server.http.rate_limits import KeyLimits
from ingot.runtime.server.http.retry import Client
from ingot.runtime.server.models.admission import ModelAdmission
from ingot.runtime.server.models.chat import Chat, ModelReplies
from ingot.runtime.server.models.counter_totals import Totals
from ingot.runtime.server.models.prompt_repeats import PromptPieces
from ingot.runtime.server.options import ServerOptions
from ingot.runtime.steps.metrics import SECONDS_BUCKETS, Histogram
from ingot.runtime.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_WARM_UP_TOKENS = 4
_CACHED_TEXTS = 8192
_RECENT_PROMPTS = 8  # kept in memory, for the check of a new artifact


class TokenText(NamedTuple):
    """What one token spells, alone: bytes that are not UTF-8 are U+FFFD in the text."""

    text: str
    data: bytes


class ServedModel:
    """An engine with its name, its admission and the state of its steps.

    artifact        what the engine was loaded from, and is loaded from again; None in programs that load it themselves
    draft           the artifact of its draft model
    failing         why no request is served although the engine runs (`self_check`); None while some are
    totals          what all engines that served the model have counted
    """

    def __init__(
        self,
        name: str,
        engine: AsyncEngine,
        options: ServerOptions,
        artifact: Artifact | None = None,
        draft: Artifact | None = None,
    ) -> None:
        if engine.tokenizer is None:
            raise UsageError(f"{name} has no tokenizer, and the API serves texts; build it from a checkpoint with one")
        if engine.process:
            engine.process.give_way(options.engine_nice)
        self.name = name
        self.engine = engine
        self.artifact = artifact
        self.draft = draft
        self.tokenizer: Tokenizer = engine.tokenizer
        self.gate = ModelAdmission(engine, options)
        self.created = int(time.time())
        self.encode_seconds = Histogram(SECONDS_BUCKETS)
        self.pieces = PromptPieces()
        self.recent_prompts: deque[TokenIds] = deque(maxlen=_RECENT_PROMPTS)
        self.is_restarting = False
        self.is_unloaded = False  # because it was idle
        self.failing: str | None = None
        self.token_text = lru_cache(_CACHED_TEXTS)(self._token_text)
        self.replies = ModelReplies(self.tokenizer, options.json_whitespace)
        self._stall_seconds = options.stall_seconds
        self._most_prompt_tokens = options.max_prompt_tokens
        self._most_output_tokens = options.max_output_tokens
        metrics = engine.metrics()
        self._pool_tokens = metrics.blocks_total * metrics.block_tokens
        self._last_step = (0, time.monotonic())
        self.totals = Totals()
        self.totals.begin(self, self._counts)

    @property
    def serves(self) -> bool:
        """Whether requests are answered, as far as is known: one may fail."""
        return self.engine.is_healthy and not self.is_unloaded and not self.failing

    @property
    def context_tokens(self) -> int:
        """Most tokens of prompt and output together: of the model, or of the KV pool where that holds fewer."""
        return min(self.engine.model.context_tokens, self._pool_tokens)

    def fitted(self, params: SamplingParams, prompt_tokens: int, limits: KeyLimits) -> SamplingParams:
        """The parameters with as many output tokens as the context, the server and the key allow."""
        allowed = (self.context_tokens - prompt_tokens, self._most_output_tokens, limits.max_output_tokens)
        most = max(1, min(limit for limit in (params.max_tokens, *allowed) if limit is not None))
        return replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))

    @property
    def most_prompt_tokens(self) -> int:
        """Most tokens of a prompt."""
        longest = self.context_tokens - 1
        return longest if self._most_prompt_tokens is None else min(longest, self._most_prompt_tokens)

    def least_tokens(self, num_chars: int) -> int:
        """Fewest tokens that a text of this length can have."""
        most_chars = self.tokenizer.max_chars_per_token
        return max(1, -(-num_chars // most_chars)) if most_chars else 1

    async def encode_chat(self, chat: Chat) -> list[int]:
        """Tokens of a conversation. RequestError when the chat template refuses it."""
        messages = self.replies.known_roles(chat.messages)
        return await self.engine.encode_chat(messages, tools=chat.tools or None, variables=chat.variables)

    def require_length(self, num_tokens: int, field: str) -> None:
        """Raise ApiError for a prompt that is too long."""
        most = self.most_prompt_tokens
        if num_tokens > most:
            limit = (
                "prompt and output together" if most == self.context_tokens - 1 else f"and max_prompt_tokens is {most}"
            )
            raise ApiError(
                400,
                f"This model's maximum context length is {self.context_tokens} tokens, {limit}; the prompt is"
                f" too long, with {num_tokens} tokens or more: shorten it",
                param=field,
                code="context_length_exceeded",
            )

    def require_tokens(self, tokens: Sequence[int], field: str) -> None:
        """Raise ApiError for a token id that the model does not have."""
        size = self.engine.model.vocab_size
        wrong = next((token for token in tokens if not 0 <= token < size), None)
        if wrong is not None:
            raise ApiError(
                400, f"{field} has {shown(wrong)}; the model's token ids go from 0 to {size - 1}", param=field,
                code="invalid_value",
            )  # fmt: skip

    def _token_text(self, token_id: int) -> TokenText:
        entry = self.tokenizer.token(token_id, skip_special_tokens=False)
        piece = self.tokenizer.text_decoder.piece(entry, first=False) if entry is not None else ""
        data = piece if isinstance(piece, bytes) else piece.encode()
        return TokenText(data.decode(errors="replace"), data)

    async def warm_up(self) -> None:
        """Serve a request as long as a step may be, so that the first of a user finds everything loaded.

        From then on this event loop reads what an engine's process sends: to wake a thread for that takes longer.
        """
        if self.engine.process:
            self.engine.process.read_in(asyncio.get_running_loop())
        longest = max(1, min(self.engine.engine.max_batch_tokens, self.context_tokens - _WARM_UP_TOKENS))
        params = SamplingParams(max_tokens=_WARM_UP_TOKENS, ignore_eos=True)
        options = RequestOptions(prefix_cache=False)
        try:
            await self.engine.generate([0] * longest, params, options=options)
        except RequestError:  # the pool has fewer blocks
            await self.engine.generate([0], params, options=options)

    async def close(self, *, drain: bool = False) -> None:
        """Close the engine, whose successor serves, or is loaded when it is needed; what goes wrong is logged."""
        try:
            await self.engine.close(drain=drain)
        except Exception:  # noqa: BLE001 (its successor serves)
            _log.exception("%s: an engine could not be closed", self.name)
        finally:
            self.totals.end(self)

    def succeed(self, old: "ServedModel") -> None:
        """Count on from what the model's engines have counted so far."""
        self.totals = old.totals
        self.totals.begin(self, self._counts)

    def count_lost(self) -> None:
        """Count a request that could not be served because the engine's process died, and its counts with it."""
        if self.engine.process:
            self.totals.add({"failed_requests": 1, "finished_requests": 1, "request_success": {"error": 1}})

    def _counts(self) -> dict[str, Value]:
        """Counters and histograms of this engine, by the names of their metrics."""
        metrics = self.engine.metrics()
        found = {metric.name: metric.read(metrics) for metric in METRICS if metric.kind != "gauge"}
        own: dict[str, Value] = {
            "turned_away": self.gate.num_refused,
            "prompt_pieces": self.pieces.num_pieces,
            "repeated_prompt_pieces": self.pieces.num_repeated,
            "leading_prompt_pieces": self.pieces.num_leading,
            "encode_seconds": self.encode_seconds.snapshot(),
        }
        return {name: value for name, value in found.items() if value is not None} | own

    @property
    def passing_problem(self) -> str | None:
        """Why no request is served at present although the engine runs."""
        return self.failing or self.engine.metrics().stage_problem or None

    def problem(self) -> str | None:
        """Why the engine does not serve: it failed, or a step takes too long. None while it does."""
        if self.is_unloaded:
            return None
        if self.engine.error:
            return str(self.engine.error)
        metrics, now = self.engine.metrics(), time.monotonic()
        if not metrics.num_running or metrics.num_steps != self._last_step[0]:
            self._last_step = (metrics.num_steps, now)
        process = self.engine.process
        stalled = max(now - self._last_step[1], process.unanswered_seconds if process else 0.0)
        if stalled > self._stall_seconds:
            return f"the engine has made no step for {stalled:.0f} s; stall_seconds is {self._stall_seconds:g}"
        return None


def require_names(models: Sequence[str], aliases: Mapping[str, str], adapters: Sequence[str]) -> None:
    """Raise UsageError when a name of a model, an alias or an adapter is used twice, or an alias leads nowhere."""
    for name in models:
        if models.count(name) > 1:
            raise UsageError(f"two models are named {shown(name)}; build one of them under another name")
    for alias, name in aliases.items():
        if name not in models:
            raise UsageError(f"alias {alias}: {unknown('model', name, models, 'models')}")
        if alias in models:
            raise UsageError(f"alias {alias}: a model has this name; choose another alias, or leave it out")
    for name in adapters:
        if name in models or name in aliases or adapters.count(name) > 1:
            raise UsageError(f"the adapter {shown(name)} has the name of a model or of another adapter; rename it")


async def warmed_up(loading: Awaitable[ServedModel]) -> ServedModel:
    """The model that is being loaded, once it has served a request. If that fails, its engine is closed."""
    model = await loading
    try:
        await model.warm_up()
    except BaseException:
        await model.close()
        raise
    return model


def log_failure(log: logging.Logger, what: str, error: Exception) -> None:
    """Log an error, with its traceback unless it is one of Ingot's own, which say what to do."""
    log.error("%s: %s", what, error, exc_info=None if isinstance(error, IngotError) else error)


class Models:
    """Models by name and alias."""

    def __init__(self, models: Sequence[ServedModel], aliases: Mapping[str, str] | None = None) -> None:
        """Raises UsageError as `require_names` does."""
        self.aliases = dict(aliases or {})
        self._sharing: dict[ServedModel, ServedModel] = {}
        adapters = [name for model in models for name in model.engine.adapters]
        require_names([model.name for model in models], self.aliases, adapters)
        self.all = tuple(models)
        self.by_name = {model.name: model for model in models}
        self.by_name |= {alias: self.by_name[name] for alias, name in self.aliases.items()}

    def adapter_holder(self, name: str | None) -> ServedModel | None:
        """The model that has a LoRA adapter of this name."""
        return next((model for model in self.all if name in model.engine.adapters), None)

    @property
    def names(self) -> list[str]:
        """What requests can name: models, aliases, and adapters after the model that they change."""
        return [*self.by_name, *(name for model in self.all for name in model.engine.adapters)]

    def replace(self, old: ServedModel, new: ServedModel) -> None:
        """Serve one model by another from now on; requests that are open stay where they are."""
        new.succeed(old)
        self.all = tuple(new if model is old else model for model in self.all)
        self.by_name = {name: new if model is old else model for name, model in self.by_name.items()}

    @contextmanager
    def shared(self, old: ServedModel, new: ServedModel) -> Iterator[None]:
        """Have the engine that was replaced take requests too, so that both have as many open."""
        self._sharing[new] = old
        try:
            yield
        finally:
            del self._sharing[new]

    @property
    def with_requests(self) -> tuple[ServedModel, ...]:
        """All that take requests now, with engines that were replaced and share them."""
        return (*self.all, *self._sharing.values())

    @property
    def counting(self) -> set[ServedModel]:
        """All whose counters may grow: those that take requests, and those that serve their last ones."""
        return {each for model in self.all for each in model.totals.engines if isinstance(each, ServedModel)}

    def less_busy(self, model: ServedModel) -> ServedModel:
        """The engine for a new request: of two that share a model's requests, the one with fewer of them open."""
        other = self._sharing.get(model, model)
        return other if other.engine.is_healthy and other.gate.num_open < model.gate.num_open else model

    def require_place(self, client: Client) -> None:
        """Raise ApiError 429, before a request is parsed, when it would be refused whatever is in it."""
        if len(self.all) == 1:
            self.all[0].gate.require_place(1, client)

    def find(self, name: str | None) -> ServedModel:
        """The model of a request, by its name, an alias or an adapter of it; without a name, the only one.

        ApiError 404 for a name that is unknown.
        """
        if name is None and len(self.all) == 1:
            return self.all[0]
        if name is None:
            raise ApiError(400, f"model is missing; models: {', '.join(self.names)}", param="model")
        found = self.by_name.get(name) or self.adapter_holder(name)
        if found is None:
            missing = shown(name).removeprefix("'").removesuffix("'")
            message = f"The model `{missing}` does not exist{near_or_all(name, self.names, 'models')}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return found
