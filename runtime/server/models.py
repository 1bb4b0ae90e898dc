"""The models of a server: an engine each, found by the name of its artifact or by an alias."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from ingot.errors import RequestError, UsageError, shown, unknown
from ingot.runtime.async_engine import AsyncEngine
from ingot.runtime.metrics import SECONDS_BUCKETS, Histogram
from ingot.runtime.prompts import TokenIds
from ingot.runtime.request_options import RequestOptions
from ingot.runtime.sampling import SamplingParams
from ingot.runtime.server.api_error import ApiError
from ingot.runtime.server.gate import Gate
from ingot.runtime.server.options import ServerOptions
from ingot.runtime.server.prompt_pieces import PromptPieces
from ingot.runtime.server.replies import ModelReplies
from ingot.runtime.server.schemas import Chat
from ingot.runtime.text.tokenizer import Tokenizer

_WARM_UP_TOKENS = 4
_CACHED_TEXTS = 8192
_RECENT_PROMPTS = 8  # kept in memory, for the check of a new artifact


class TokenText(NamedTuple):
    """What one token spells, alone: bytes that are not UTF-8 are U+FFFD in the text."""

    text: str
    data: bytes


class ServedModel:
    """An engine with its name, its admission and the state of its steps."""

    def __init__(self, name: str, engine: AsyncEngine, options: ServerOptions) -> None:
        if engine.tokenizer is None:
            raise UsageError(f"{name} has no tokenizer, and the API serves texts; build it from a checkpoint with one")
        if engine.process:
            engine.process.give_way(options.engine_nice)
        self.name = name
        self.engine = engine
        self.tokenizer: Tokenizer = engine.tokenizer
        self.gate = Gate(engine, options)
        self.created = int(time.time())
        self.encode_seconds = Histogram(SECONDS_BUCKETS)
        self.pieces = PromptPieces()
        self.recent_prompts: deque[TokenIds] = deque(maxlen=_RECENT_PROMPTS)
        self.is_restarting = False
        self.is_unloaded = False  # because it was idle
        self.token_text = lru_cache(_CACHED_TEXTS)(self._token_text)
        self.replies = ModelReplies(self.tokenizer, options.json_whitespace)
        self._stall_seconds = options.stall_seconds
        self._most_prompt_tokens = options.max_prompt_tokens
        self._last_step = (0, time.monotonic())

    @property
    def context_tokens(self) -> int:
        """Most tokens of prompt and output together."""
        return self.engine.model.context_tokens

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
                f"the model's context is {self.context_tokens} tokens, prompt and output together"
                if most == self.context_tokens - 1
                else f"max_prompt_tokens is {most}"
            )
            raise ApiError(
                400,
                f"the prompt has {num_tokens} tokens or more; {limit}: shorten it",
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
        """Serve a request as long as a step may be, so that the first of a user finds everything loaded."""
        longest = max(1, min(self.engine.engine.max_batch_tokens, self.context_tokens - _WARM_UP_TOKENS))
        params = SamplingParams(max_tokens=_WARM_UP_TOKENS, ignore_eos=True)
        options = RequestOptions(prefix_cache=False)
        try:
            await self.engine.generate([0] * longest, params, options=options)
        except RequestError:  # the pool has fewer blocks
            await self.engine.generate([0], params, options=options)

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


class Models:
    """Models by name and alias."""

    def __init__(self, models: Sequence[ServedModel], aliases: Mapping[str, str] | None = None) -> None:
        """Raises UsageError when a name is used twice, or an alias leads nowhere."""
        self.all = tuple(models)
        self.by_name: dict[str, ServedModel] = {}
        for model in models:
            self._add(model.name, model)
        for alias, name in (aliases or {}).items():
            if name not in {model.name for model in models}:
                raise UsageError(f"alias {alias}: {unknown('model', name, [model.name for model in models], 'models')}")
            self._add(alias, self.by_name[name])
        adapters = [name for model in models for name in model.engine.adapters]
        for name in adapters:
            if name in self.by_name or adapters.count(name) > 1:
                raise UsageError(f"the adapter {shown(name)} has the name of a model or of another adapter; rename it")

    def _add(self, name: str, model: ServedModel) -> None:
        if name in self.by_name:
            raise UsageError(f"two models are named {shown(name)}; build one of them under another name")
        self.by_name[name] = model

    def adapter_holder(self, name: str | None) -> ServedModel | None:
        """The model that has a LoRA adapter of this name."""
        return next((model for model in self.all if name in model.engine.adapters), None)

    @property
    def names(self) -> list[str]:
        """What requests can name: models, aliases, and adapters after the model that they change."""
        return [*self.by_name, *(name for model in self.all for name in model.engine.adapters)]

    def replace(self, old: ServedModel, new: ServedModel) -> None:
        """Serve one model by another from now on; requests that are open stay where they are."""
        self.all = tuple(new if model is old else model for model in self.all)
        self.by_name = {name: new if model is old else model for name, model in self.by_name.items()}

    def require_place(self, client: bytes, group: str) -> None:
        """Raise ApiError 429, before a request is parsed, when it would be refused whatever is in it."""
        if len(self.all) == 1:
            self.all[0].gate.require_place(1, client, group)

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
            message = unknown("model", name, self.names, "models")
            raise ApiError(404, message, param="model", code="model_not_found")
        return found
