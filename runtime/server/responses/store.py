"""Responses that are kept in memory, so that they can be read again and continued; the oldest give way to new ones.

They are bounded in number and in bytes of their JSON, each with the whole conversation that it continues. Those of one
API key are not found with another.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ingot.errors import shown
from ingot.runtime.server.api_error import ApiError
from ingot.runtime.text.messages import Message

_CONTINUED = ("completed", "incomplete")


@dataclass(frozen=True)
class Kept:
    """A response, the items of its request's input, and its conversation to its end, without instructions."""

    body: dict[str, Any]
    input_items: Sequence[dict[str, Any]]
    conversation: Sequence[Message]
    num_bytes: int


class ResponseStore:
    """The responses of a server by the holder of their key and their id."""

    def __init__(self, most_responses: int, most_bytes: int) -> None:
        self.most_responses = most_responses
        self.most_bytes = most_bytes
        self.num_bytes = 0
        self._kept: OrderedDict[tuple[str, str], Kept] = OrderedDict()

    def put(
        self,
        group: str,
        body: dict[str, Any],
        conversation: Sequence[Message],
        input_items: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Keep a response, in place of one with its id. One that alone is too large is not kept."""
        self._remove((group, body["id"]))
        num_bytes = sum(len(json.dumps(part)) for part in (body, input_items, conversation))
        if num_bytes > self.most_bytes or not self.most_responses:
            return
        while self._kept and (len(self._kept) >= self.most_responses or self.num_bytes + num_bytes > self.most_bytes):
            self._remove(next(iter(self._kept)))
        self._kept[group, body["id"]] = Kept(body, input_items, conversation, num_bytes)
        self.num_bytes += num_bytes

    def has(self, group: str, name: str) -> bool:
        """Whether a response is kept."""
        return (group, name) in self._kept

    def get(self, group: str, name: str) -> dict[str, Any]:
        """A response. ApiError 404 for one that is not kept."""
        return self._found(group, name).body

    def input_items(self, group: str, name: str) -> Sequence[dict[str, Any]]:
        """The items of the input of a response's request. ApiError 404 for one that is not kept."""
        return self._found(group, name).input_items

    def _found(self, group: str, name: str) -> Kept:
        found = self._kept.get((group, name))
        if found is None:
            raise ApiError(404, f"the response {shown(name)} is not kept", param="response_id", code="not_found")
        return found

    def delete(self, group: str, name: str) -> None:
        """Forget a response. ApiError 404 for one that is not kept."""
        self.get(group, name)
        self._remove((group, name))

    def conversation(self, group: str, name: str) -> Sequence[Message]:
        """The conversation up to a response, to be continued. ApiError 400 if that cannot be."""
        found = self._kept.get((group, name))
        if found is None:
            reason = "the server keeps no responses" if not self.most_responses else "it is not kept, or not any more"
            raise ApiError(
                400,
                f"previous_response_id is {shown(name)}: {reason}; send the conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        if found.body["status"] not in _CONTINUED:
            raise ApiError(
                400,
                f"previous_response_id is {shown(name)}, whose status is {found.body['status']}; only responses that"
                f" are {' or '.join(_CONTINUED)} can be continued",
                param="previous_response_id",
                code="invalid_value",
            )
        self._kept.move_to_end((group, name))
        return found.conversation

    def _remove(self, key: tuple[str, str]) -> None:
        found = self._kept.pop(key, None)
        self.num_bytes -= found.num_bytes if found else 0
