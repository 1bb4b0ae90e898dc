"""Responses that are kept in memory, so that they can be read again and continued; the oldest give way to new ones.

They are bounded in number and in bytes of their JSON, each with the whole conversation that it continues. Those of one
API key are not found with another. The holder of a key may use all of the store while no other needs it; otherwise the
one that uses most of it gives up its oldest response first, so that no holder loses any within its fair share.
"""

import json
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ingot.errors import shown
from ingot.runtime.server.http.api_error import ApiError
from ingot.runtime.text.messages import Message

_CONTINUED = ("completed", "incomplete")


@dataclass(frozen=True)
class StoredResponse:
    """A response, the items of its request's input, and its conversation to its end, without instructions."""

    body: dict[str, Any]
    input_items: Sequence[dict[str, Any]]
    conversation: Sequence[Message]
    num_bytes: int


class _Shelf:
    """Responses of one holder, the least recently used first."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def put(self, name: str, kept: StoredResponse) -> None:
        self.kept[name] = kept
        self.num_bytes += kept.num_bytes

    def remove(self, name: str) -> StoredResponse:
        removed = self.kept.pop(name)
        self.num_bytes -= removed.num_bytes
        return removed


class ResponseStore:
    """The responses of a server by the holder of their key and their id."""

    def __init__(self, most_responses: int, most_bytes: int) -> None:
        self.most_responses = most_responses
        self.most_bytes = most_bytes
        self.num_bytes = 0
        self.num_responses = 0
        self._shelves: dict[str, _Shelf] = {}

    def put(
        self,
        group: str,
        body: dict[str, Any],
        conversation: Sequence[Message],
        input_items: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Keep a response, in place of one with its id. One that alone is too large is not kept."""
        self._remove(group, body["id"])
        num_bytes = sum(len(json.dumps(part)) for part in (body, input_items, conversation))
        if num_bytes > self.most_bytes or not self.most_responses:
            return
        given_up = self._given_up(group, num_bytes)
        if given_up is None:
            return
        for holder, name in given_up:
            self._remove(holder, name)
        shelf = self._shelves.setdefault(group, _Shelf())
        shelf.put(body["id"], StoredResponse(body, input_items, conversation, num_bytes))
        self.num_bytes += num_bytes
        self.num_responses += 1

    def _given_up(self, group: str, num_bytes: int) -> list[tuple[str, str]] | None:
        """Responses that give way to one of a holder; None where it would be the first to give way itself.

        The next one is always that of the holder with the most, by number or by bytes, whichever is short.
        """
        counts, sizes = Counter({group: 1}), Counter({group: num_bytes})
        oldest = {}
        for each, shelf in self._shelves.items():
            counts[each] += len(shelf.kept)
            sizes[each] += shelf.num_bytes
            oldest[each] = iter(shelf.kept.items())
        given_up = []
        while (many := counts.total() > self.most_responses) or sizes.total() > self.most_bytes:
            used = counts if many else sizes
            holder = max(used, key=lambda each: (used[each], each == group and counts[each] > 1))
            if holder == group and counts[group] == 1:
                return None
            name, kept = next(oldest[holder])
            given_up.append((holder, name))
            counts[holder] -= 1
            sizes[holder] -= kept.num_bytes
        return given_up

    def has(self, group: str, name: str) -> bool:
        """Whether a response is kept."""
        return self._kept(group, name) is not None

    def _kept(self, group: str, name: str) -> StoredResponse | None:
        shelf = self._shelves.get(group)
        return shelf.kept.get(name) if shelf else None

    def get(self, group: str, name: str) -> dict[str, Any]:
        """A response. ApiError 404 for one that is not kept."""
        return self._found(group, name).body

    def input_items(self, group: str, name: str) -> Sequence[dict[str, Any]]:
        """The items of the input of a response's request. ApiError 404 for one that is not kept."""
        return self._found(group, name).input_items

    def _found(self, group: str, name: str) -> StoredResponse:
        found = self._kept(group, name)
        if found is None:
            raise ApiError(404, f"the response {shown(name)} is not kept", param="response_id", code="not_found")
        return found

    def delete(self, group: str, name: str) -> None:
        """Forget a response. ApiError 404 for one that is not kept."""
        self.get(group, name)
        self._remove(group, name)

    def conversation(self, group: str, name: str) -> Sequence[Message]:
        """The conversation up to a response, to be continued. ApiError 400 if that cannot be."""
        found = self._kept(group, name)
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
        self._shelves[group].kept.move_to_end(name)
        return found.conversation

    def _remove(self, group: str, name: str) -> None:
        if not self.has(group, name):
            return
        shelf = self._shelves[group]
        self.num_bytes -= shelf.remove(name).num_bytes
        self.num_responses -= 1
        if not shelf.kept:
            del self._shelves[group]
