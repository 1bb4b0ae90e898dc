"""`ServerOptions`: limits and times of a server. Those of an engine are `EngineOptions`."""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path

from ingot.errors import UsageError, one_of, shown
from ingot.runtime.constraints.constraint import WHITESPACE, JsonWhitespace

_MOST = 1 << 40
_MOST_NICE = 19


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What the server accepts and how long it waits. Raises UsageError for a value that is out of range.

    max_requests        most open requests of a model: waiting and running; more get 429
    max_waiting_tokens  most prompt tokens of a model's requests that have no output yet; a request that would exceed it
                        while others wait gets 429
    max_ttft_seconds    refuse a request with 429 whose first token would come later than this, by the rates measured;
                        None: no limit
    max_prompt_tokens   longest prompt; None: what the model's context holds
    max_body_bytes      longest body of a request; longer ones get 413
    held_body_bytes     most bytes of the bodies of all open requests together, half of it for one API key; a body that
                        would exceed it gets 429
    request_seconds     longest time of a request, which then ends with its output so far; None: no limit
    body_seconds        longest time in which a request's head must arrive, and its body after that
    send_seconds        longest time for which a client may accept nothing of its answer; then its request is aborted
    stream_seconds      least time between two events of a stream: outputs that arrive within it are sent together. The
                        first event and the last do not wait.
    probation_seconds   time after a swap of artifacts in which the old engine stays loaded, to take over again
    drain_seconds       longest time after SIGTERM in which open requests are served to their ends
    idle_unload_seconds time without a request after which a model is unloaded until the next one; None: never
    share_prefix_cache  holders of API keys share cached prompts; otherwise each finds its own alone, so that neither
                        `cached_tokens` nor the time to a first token tells one what another has sent
    allowed_hosts       names by which clients may call the server besides its own; "*": all. Empty: a server on a
                        loopback address and without keys takes its own names alone, any other takes all
    cors_origins        origins whose web pages may use it, such as https://app.example; "*": all
    stored_responses    most responses of /v1/responses that are kept; 0: none
    stored_response_bytes  most bytes of those, with their conversations, as JSON
    engine_nice         how much lower the priority of an engine's process is than the server's (nice(2)): where they
                        share processors, requests are read and refused before the next step is computed
    stall_seconds       longest step of an engine; after that it counts as broken
    json_whitespace     white space in JSON that a request constrains: "compact" or "flexible"; see `Constraint`
    lenient             leave out unknown fields of requests whatever their value is, instead of refusing them
    price_per_hour      of the machine, in any currency, for the metric of costs; None: it is not counted
    lora_folder         folder whose LoRA adapters may be loaded while the server runs; None: none may
    """

    max_requests: int = 256
    max_waiting_tokens: int = 65536
    max_ttft_seconds: float | None = None
    max_prompt_tokens: int | None = None
    max_body_bytes: int = 8 << 20
    held_body_bytes: int = 256 << 20
    request_seconds: float | None = None
    body_seconds: float = 30.0
    send_seconds: float = 30.0
    stream_seconds: float = 0.02
    probation_seconds: float = 60.0
    drain_seconds: float = 30.0
    idle_unload_seconds: float | None = None
    share_prefix_cache: bool = False
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    stored_responses: int = 1024
    stored_response_bytes: int = 64 << 20
    engine_nice: int = 5
    stall_seconds: float = 120.0
    json_whitespace: JsonWhitespace = "compact"
    lenient: bool = False
    price_per_hour: float | None = None
    lora_folder: Path | None = None

    def __post_init__(self) -> None:
        if self.json_whitespace not in WHITESPACE:
            raise UsageError(f"json_whitespace is {shown(self.json_whitespace)}; it must be {one_of(WHITESPACE)}")
        for name in ("max_requests", "max_waiting_tokens", "max_prompt_tokens", "max_body_bytes", "held_body_bytes"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value, Integral) and 1 <= value <= _MOST):
                raise UsageError(f"{name} is {shown(value)}; it must be a whole number from 1 to {_MOST}")
        for name in ("stored_responses", "stored_response_bytes"):
            value = getattr(self, name)
            if not (_is_number(value, Integral) and 0 <= value <= _MOST):
                raise UsageError(f"{name} is {shown(value)}; it must be a whole number from 0 to {_MOST}")
        if not (_is_number(self.engine_nice, Integral) and 0 <= self.engine_nice <= _MOST_NICE):
            raise UsageError(
                f"engine_nice is {shown(self.engine_nice)}; it must be a whole number from 0 to {_MOST_NICE}"
            )
        for name in (
            "max_ttft_seconds",
            "request_seconds",
            "body_seconds",
            "send_seconds",
            "stall_seconds",
            "idle_unload_seconds",
        ):
            value = getattr(self, name)
            if value is not None and not (_is_number(value, Real) and 0 < value < math.inf):
                raise UsageError(f"{name} is {shown(value)}; it must be a finite number above 0")
        for name in ("stream_seconds", "probation_seconds", "drain_seconds", "price_per_hour"):
            value = getattr(self, name)
            if value is None and name == "price_per_hour":
                continue
            if not (_is_number(value, Real) and 0 <= value < math.inf):
                raise UsageError(f"{name} is {shown(value)}; it must be a finite number, 0 or above")


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
