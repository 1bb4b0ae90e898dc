"""`ServerOptions`: limits and times of a server. Those of an engine are `EngineOptions`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ingot.options import Doc, Flag, Range, check_options, documented
from ingot.runtime.constraints.constraint import JsonWhitespace

_COUNT = Range(ge=1, le=1 << 40)
_COUNT_OR_NONE = Range(ge=0, le=1 << 40)
_POSITIVE = Range(gt=0)
_NOT_NEGATIVE = Range(ge=0)


@documented
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What the server accepts and how long it waits. Raises UsageError for a value that is out of range.

    A server on a loopback address and without keys answers to its own names alone, and any other server to all names;
    `allowed_hosts` replaces both. Without `share_prefix_cache`, neither `cached_tokens` nor the time to a first token
    tells a holder of a key what another has sent. Where an engine's process and the server share processors,
    `engine_nice` has requests read and refused before the next step is computed.
    """

    max_requests: Annotated[int, _COUNT, Doc("most open requests of a model, waiting and running; more get 429")] = 256
    max_waiting_tokens: Annotated[
        int,
        _COUNT,
        Doc("most prompt tokens of requests without output; one that exceeds it while others wait gets 429"),
    ] = 65536
    max_ttft_seconds: Annotated[
        float | None,
        _POSITIVE,
        Doc("refuse a request with 429 whose first token would come later, by the rates measured", none="no limit"),
    ] = None
    max_prompt_tokens: Annotated[
        int | None,
        _COUNT,
        Doc("longest prompt", none="what the model's context holds"),
    ] = None
    max_output_tokens: Annotated[
        int | None,
        _COUNT,
        Doc("most tokens of an answer: its default, and where longer ones are cut", none="what the context holds"),
    ] = None
    max_body_bytes: Annotated[int, _COUNT, Doc("longest body of a request; longer ones get 413")] = 8 << 20
    held_body_bytes: Annotated[
        int,
        _COUNT,
        Doc("bytes of the bodies of all open requests, half for one API key; a body that exceeds it gets 429"),
    ] = 256 << 20
    request_seconds: Annotated[
        float | None,
        _POSITIVE,
        Doc("longest time of a request, which then ends with its output so far", none="no limit"),
    ] = None
    body_seconds: Annotated[
        float,
        _POSITIVE,
        Doc("longest time for a request's head to arrive, and for its body after that"),
    ] = 30.0
    send_seconds: Annotated[
        float,
        _POSITIVE,
        Doc("abort a request whose client accepts nothing of its answer for so long"),
    ] = 30.0
    stream_seconds: Annotated[
        float,
        _NOT_NEGATIVE,
        Doc("least time between events of a stream, but for the first and the last; 0: none"),
    ] = 0.02
    probation_seconds: Annotated[
        float,
        _NOT_NEGATIVE,
        Doc("time after a swap of artifacts in which the old engine stays loaded, to take over again"),
    ] = 60.0
    drain_seconds: Annotated[
        float,
        _NOT_NEGATIVE,
        Doc("longest time after SIGTERM in which open requests are served to their ends"),
    ] = 30.0
    idle_unload_seconds: Annotated[
        float | None,
        _POSITIVE,
        Flag("--idle-unload", "SECONDS"),
        Doc("unload a model after this time without a request, until the next one", none="never"),
    ] = None
    share_prefix_cache: Annotated[bool, Doc("let holders of API keys find each other's cached prompts")] = False
    allowed_hosts: Annotated[
        tuple[str, ...],
        Flag("--allowed-host", "NAME"),
        Doc("refuse requests for other names than this, localhost and addresses; * allows all"),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Flag("--allowed-origins", "URL", ("--cors-origin",)),
        Doc("let web pages of this origin use the server, such as http://localhost:3000; * allows all"),
    ] = ()
    stored_responses: Annotated[int, _COUNT_OR_NONE, Doc("most kept responses of /v1/responses; 0: none")] = 1024
    stored_response_bytes: Annotated[
        int,
        _COUNT_OR_NONE,
        Doc("most bytes of those with their conversations, as JSON"),
    ] = 64 << 20
    engine_nice: Annotated[int, Range(ge=0, le=19), Doc("lower the priority of an engine's process by this (nice)")] = 5
    stall_seconds: Annotated[
        float,
        _POSITIVE,
        Doc("longest step of an engine; then it counts as broken, and /health fails"),
    ] = 120.0
    json_whitespace: Annotated[
        JsonWhitespace,
        Doc("white space in JSON of structured outputs: at most a space after a comma and a colon, or any"),
    ] = "compact"
    lenient: Annotated[
        bool,
        Doc("leave out unknown fields of requests whatever their value is, instead of a 400"),
    ] = False
    price_per_hour: Annotated[
        float | None,
        _NOT_NEGATIVE,
        Flag(metavar="PRICE"),
        Doc("price of the machine, in any currency: /metrics then has ingot_cost_total, for the cost of tokens"),
    ] = None
    lora_folder: Annotated[
        Path | None,
        Flag("--allow-lora-updates", "FOLDER"),
        Doc("let holders of admin keys load adapters from this folder, and unload them, while the server runs"),
    ] = None

    def __post_init__(self) -> None:
        check_options(self, full=True)
