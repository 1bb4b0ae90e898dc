"""The engine's side of the connection: which outputs leave together, and that nothing of a cancelled request stays."""

import logging
import math
import re
import select
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest

from ingot.errors import EngineError
from ingot.runtime.asking.outputs import RequestOutput, SampledToken
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.hosting import engine_process_child, engine_process_messages
from ingot.runtime.hosting.engine_process_child import ServedRequest, SocketOutlet
from ingot.runtime.hosting.engine_process_messages import Connection, Open, Outputs, unpack
from ingot.runtime.requests.engine_request import EngineRequest
from tests.runtime.engines import text_engine

KEY = 5


class Ends:
    """An outlet, what it holds open, and the other end of its connection."""

    def __init__(self, interval_seconds: float, *, reports_end: bool = False, beside_steps: bool = False) -> None:
        ours, theirs = socket.socketpair()
        theirs.settimeout(60)
        self._arrived = select.poll()
        self._arrived.register(theirs, select.POLLIN)
        self.theirs = Connection(theirs)
        self.open: dict[int, ServedRequest] = {}
        self.engine = text_engine()
        self.ours = Connection(ours)
        self.outlet = SocketOutlet(self.ours, self.engine, self.open, beside_steps=beside_steps)
        request = EngineRequest(np.arange(3), SamplingParams(), RequestOptions(), arrival_seconds=0.0)
        opened = Open(KEY, request, interval_seconds, reports_end)
        self.request = self.open[KEY] = ServedRequest.of(opened, self.outlet)

    def post(self, output: RequestOutput | Exception) -> None:
        assert self.outlet.post([(self.request, output)])

    @property
    def has_message(self) -> bool:
        return bool(self._arrived.poll(0))

    def close(self) -> None:
        self.outlet.close()
        self.engine.close()
        for end in (self.ours, self.theirs):
            end.close()

    def received(self) -> list[Any]:
        """The outputs of the next message."""
        message = self.theirs.receive()
        assert isinstance(message, Outputs)
        assert {key for key, _ in message.items} == {KEY}
        return [each if isinstance(each, Exception) else unpack(each) for _, each in message.items]


@pytest.fixture
def whole() -> Any:
    """A request of which nothing leaves between its first output and its last."""
    ends = Ends(math.inf)
    yield ends
    ends.close()


def piece(token: int, index: int = 0) -> RequestOutput:
    return RequestOutput(1, f"<{token}>", (SampledToken(token),), index=index)


def test_what_waits_leaves_before_the_outlet_is_closed(whole: Ends) -> None:
    whole.post(piece(1))
    whole.received()
    whole.post(piece(2))
    whole.outlet.close()
    assert whole.has_message
    assert whole.received() == [piece(2)]


def test_the_first_output_leaves_at_once_and_the_others_with_the_end(whole: Ends) -> None:
    whole.post(piece(1))
    assert whole.received() == [piece(1)]
    for token in (2, 3, 4, 5):
        whole.post(piece(token, index=token % 2))
    failure = EngineError("the engine failed")
    whole.post(failure)
    even, odd, last = whole.received()
    assert (even.index, even.text, even.token_ids) == (0, "<2><4>", (2, 4))
    assert (odd.index, odd.text, odd.token_ids) == (1, "<3><5>", (3, 5))
    assert str(last) == str(failure)
    assert not whole.open


def test_outputs_leave_when_the_interval_is_over_without_another_step() -> None:
    ends = Ends(0.01)
    ends.post(piece(1))
    assert ends.received() == [piece(1)]
    ends.post(piece(2))
    assert ends.received() == [piece(2)]
    ends.close()


def test_what_is_due_leaves_when_the_next_step_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process_child, "_MOST_DELAY_SECONDS", math.inf)  # the thread never sends it
    ends = Ends(0.001)
    ends.post(piece(1))
    assert ends.received() == [piece(1)]
    ends.engine.add([1, 2, 3])  # a step follows
    for token in (2, 3):
        ends.post(piece(token))
        assert not ends.has_message
    time.sleep(0.002)
    ends.outlet.send_due()
    (both,) = ends.received()
    assert both.token_ids == (2, 3)
    ends.outlet.send_due()
    assert not ends.has_message
    ends.close()


def test_what_is_due_leaves_at_the_end_of_a_step_where_steps_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process_child, "_MOST_DELAY_SECONDS", 0.0)  # so every step is
    ends = Ends(1e-6)
    ends.engine.add([1, 2, 3])  # a step follows
    for token in (1, 2, 3):
        ends.post(piece(token))
        assert ends.received() == [piece(token)]
    ends.close()


def test_an_end_waits_for_the_next_step_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process_child, "_MOST_DELAY_SECONDS", math.inf)
    with text_engine() as engine:
        result = engine.generate([1, 2, 3], SamplingParams(max_tokens=1))
    last = RequestOutput(1, "<2>", (SampledToken(2),), completion=result, result=result)
    for follows in (True, False):
        ends = Ends(1.0)
        ends.post(piece(1))
        assert ends.received() == [piece(1)]
        if follows:
            ends.engine.add([1, 2, 3])
        ends.post(last)
        assert ends.has_message is not follows
        ends.outlet.send_due()
        assert ends.received() == [last]
        assert not ends.open
        ends.close()


def test_what_is_due_leaves_while_the_next_step_computes_where_a_core_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    # The thread does not send it for its age.
    monkeypatch.setattr(engine_process_child, "_MOST_DELAY_SECONDS", math.inf)
    ends = Ends(3600.0, beside_steps=True)
    ends.post(piece(1))
    assert ends.received() == [piece(1)]
    ends.engine.add([1, 2, 3])  # a step follows
    ends.post(piece(2))
    ends.request.due = 0.0  # long ago
    ends.post(piece(3))  # a step ends, and something is due
    (both,) = ends.received()
    assert both.token_ids == (2, 3)
    ends.close()


def test_nothing_overtakes_what_the_thread_is_about_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process_child, "_MOST_DELAY_SECONDS", math.inf)
    ends = Ends(3600.0, beside_steps=True)
    ends.post(piece(1))
    assert ends.received() == [piece(1)]
    send, begins, may_send = ends.ours.send, threading.Event(), threading.Event()

    def late(message: object) -> None:
        begins.set()
        assert may_send.wait(60)
        send(message)

    monkeypatch.setattr(ends.ours, "send", late)
    ends.engine.add([1, 2, 3])  # a step follows
    ends.post(piece(2))
    ends.request.due = 0.0  # long ago
    ends.post(piece(3))
    assert begins.wait(60)
    monkeypatch.setattr(ends.ours, "send", send)
    ends.post(EngineError("the engine failed"))  # which leaves at once
    assert not ends.has_message
    may_send.set()
    (both,) = ends.received()
    assert both.token_ids == (2, 3)
    (last,) = ends.received()
    assert str(last) == "the engine failed"
    ends.close()


def test_outputs_that_are_not_gathered_leave_at_the_end_of_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process_child, "_MOST_DELAY_SECONDS", math.inf)
    ends = Ends(0.0)
    for token in (1, 2, 3):
        ends.post(piece(token))
        assert ends.received() == [piece(token)]
    ends.close()


def test_nothing_of_a_cancelled_request_leaves_or_stays(whole: Ends) -> None:
    whole.post(piece(1))
    whole.received()
    whole.post(piece(2))
    whole.request.cancelled = True
    whole.outlet.drop(whole.request)
    whole.post(piece(3))  # of the step that was under way
    assert not whole.outlet.num_waiting
    whole.post(EngineError("it was aborted"))
    assert not whole.outlet.num_waiting


def test_of_a_cancelled_request_that_reports_its_end_only_that_leaves() -> None:
    ends = Ends(math.inf, reports_end=True)
    ends.post(piece(1))
    ends.received()
    ends.post(piece(2))
    ends.request.cancelled = True
    ends.outlet.drop(ends.request)
    ends.post(piece(3))
    assert not ends.outlet.num_waiting
    ends.post(EngineError("it was aborted"))
    (last,) = ends.received()
    assert str(last) == "it was aborted"
    ends.close()


def test_records_of_the_engine_reach_the_other_process_with_their_traceback() -> None:
    ours, theirs = map(Connection, socket.socketpair())
    logger = logging.Logger("ingot.runtime")
    logger.addHandler(engine_process_child._Forwarded(ours))
    try:
        raise KeyError("logits")
    except KeyError as error:
        logger.error("the engine failed", exc_info=error)
    name, level, text = theirs.receive()
    ours.close()
    theirs.close()
    assert (name, level) == ("ingot.runtime", logging.ERROR)
    assert text.startswith("the engine failed\nTraceback (most recent call last):\n")
    assert text.endswith("\nKeyError: 'logits'")


def test_no_step_waits_for_a_process_that_does_not_read_and_no_output_is_lost() -> None:
    ends = Ends(0.0)
    logger = logging.Logger("ingot.runtime")
    logger.addHandler(engine_process_child._Forwarded(ends.ours))
    num_posted = 400
    for token in range(num_posted):
        ends.post(RequestOutput(1, f"<{token}>" * 1000, (SampledToken(token),)))
        logger.warning("a step took long: %s", "x" * 1000)
    ends.post(EngineError("the engine failed " + "x" * 8_000_000))
    tokens: list[int] = []
    last = None
    while last is None:
        message = ends.theirs.receive()
        for _, each in message.items if isinstance(message, Outputs) else ():
            if isinstance(each, Exception):
                last = each
            else:
                tokens += unpack(each).token_ids
    assert tokens == list(range(num_posted))
    assert len(str(last)) > 8_000_000
    ends.close()


def test_records_that_would_wait_too_long_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process_messages, "MOST_WAITING_BYTES", 1 << 20)
    ours, theirs = map(Connection, socket.socketpair())
    logger = logging.Logger("ingot.runtime")
    logger.addHandler(engine_process_child._Forwarded(ours))
    for number in range(3000):
        logger.warning("%d %s", number, "x" * 1000)
    texts = [theirs.receive().text for _ in range(1000)]
    assert [int(text.split()[0]) for text in texts] == list(range(1000))
    while not ours.has_room():
        theirs.receive()
    logger.warning("the other process reads again")
    text = ""
    while not text.startswith("the other"):
        text = theirs.receive().text
    found = re.search(r"\((\d+) records before this one were dropped", text)
    assert found
    assert 1000 < int(found[1]) < 2000
    for end in (ours, theirs):
        end.close()


def test_a_failure_of_the_thread_that_writes_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(0.01)
    ends.post(piece(1))
    assert ends.received() == [piece(1)]
    failure = MemoryError("no memory")

    def fail(latest: float) -> Outputs:
        raise failure

    monkeypatch.setattr(ends.outlet, "_message", fail)
    with ends.outlet._changed:
        ends.request.add(piece(2), time.monotonic())
        ends.outlet._waiting.add(ends.request)
        ends.outlet._changed.notify()
    with pytest.raises(EOFError):
        ends.ours.receive()
    with pytest.raises(EOFError):
        ends.theirs.receive()
    assert ends.ours.failure is failure
    ends.close()
