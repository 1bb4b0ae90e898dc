"""What the calls of all clients share: the server that is asked, the schema of the answers, and checks of them.

Runs in the environments of the clients: imports the standard library alone.
"""

import gc
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.request import urlopen

Calls = dict[str, Callable[[], object]]

TOKENS = 200
LONG_TOKENS = 900
PROMPT = "def read(path):"
MESSAGES = [{"role": "user", "content": PROMPT}]
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": ["Rome", "Oslo"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add_city", "description": "Add a city.", "parameters": CITY}}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
UNKNOWN = "unknown-model"
# More tokens than the demo's context holds.
TOO_LONG = "x = 1\n" * 2000
UNKNOWN_TEXT, TOO_LONG_TEXT = "does not exist", "maximum context length"
LIMITED_TEXT, EMBEDDINGS_TEXT = "rate_limit|Rate limit|requests per minute|429", "Ingot generates text"
_TRIES, _SECONDS = 6, 12.0
_MOST_CAUSES = 8
_LEFT = re.compile(r"^ingot_clients_left_total\{.*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Server:
    """A server's address without /v1, a model of it, a key, and one that may send one request a minute."""

    url: str
    model: str
    key: str
    limited_key: str

    @property
    def base(self) -> str:
        """The address that clients of OpenAI take."""
        return f"{self.url}/v1"

    def clients_left(self) -> float:
        """How many clients have left before their answer ended."""
        with urlopen(f"{self.url}/metrics") as answer:
            return sum(map(float, _LEFT.findall(answer.read().decode())))


def require(value: object) -> object:
    """AssertionError for an answer without content."""
    if not value:
        raise AssertionError("the answer is empty")
    return value


def check_city(found: Any) -> None:
    """AssertionError unless it is valid by the schema: a text, a mapping, or an object with the fields."""
    city = json.loads(found) if isinstance(found, str) else found
    city = city if isinstance(city, dict) else vars(city)
    assert city["name"] in ("Rome", "Oslo"), found
    assert isinstance(city["size"], int), found
    assert 0 <= city["size"] <= 9, found


def check_usage(prompt: int | None, completion: int | None, total: int | None = None) -> None:
    """AssertionError unless the tokens are counted."""
    assert prompt, f"no tokens of the prompt are counted: {prompt}"
    assert completion, f"no tokens of the answer are counted: {completion}"
    assert total is None or total == prompt + completion, (prompt, completion, total)


def refused(call: Callable[[], object], text: str, kind: str = "") -> None:
    """AssertionError unless the call raises an error that says this, an expression, and that is of a type
    of this name, or was caused by one."""
    try:
        call()
    except Exception as error:
        if not re.search(text, chain(error)):
            raise AssertionError(f"the error does not say {text!r}: {chain(error)[:200]}") from error
        if kind and kind not in {each.__name__ for cause in causes(error) for each in type(cause).__mro__}:
            raise AssertionError(f"the error is a {type(error).__name__}, not a {kind}") from error
        return
    raise AssertionError("the call is not refused")


def limited(call: Callable[[], object], kind: str = "") -> None:
    """As `refused`, for calls with a key that may send one request a minute: the second one at the latest."""

    def twice() -> None:
        call()
        call()

    refused(twice, LIMITED_TEXT, kind)


def causes(error: BaseException | None) -> list[BaseException]:
    """An error and those that caused it."""
    found: list[BaseException] = []
    while error is not None and len(found) < _MOST_CAUSES:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def chain(error: BaseException) -> str:
    """The types and texts of an error and of those that caused it."""
    return " <- ".join(f"{type(each).__name__}: {each}" for each in causes(error))


def cancelled(server: Server, begin: Callable[[], object]) -> None:
    """AssertionError unless the server notices that the client left.

    begin  starts a stream of many tokens, reads its beginning and closes it. The model may end an answer by itself
           before the client has left, so it is tried more than once.
    """
    for _ in range(_TRIES):
        before = server.clients_left()
        begin()
        # Libraries that leave a stream to the garbage collector close its connection only then.
        gc.collect()
        until = time.monotonic() + _SECONDS / _TRIES
        while time.monotonic() < until:
            if server.clients_left() > before:
                return
            time.sleep(0.05)
    raise AssertionError("the server has not noticed that the client left")


def city_model() -> type:
    """A pydantic class with the fields of the schema."""
    from typing import Literal

    from pydantic import BaseModel, ConfigDict, Field

    class City(BaseModel):
        # Without it the schema allows further fields without end, and a small model writes them.
        model_config = ConfigDict(extra="forbid")

        name: Literal["Rome", "Oslo"]
        size: int = Field(ge=0, le=9)

    return City
