"""Messages between processes: errors and outputs arrive as they left, in any pieces."""

import inspect
import os
import socket
import threading
from dataclasses import astuple, replace

import numpy as np
import pytest

from ingot import errors
from ingot.errors import EngineError, IngotError, Overloaded, RequestError
from ingot.runtime.asking.outputs import RequestOutput, SampledToken, TokenLogprob
from ingot.runtime.asking.request_options import RequestOptions
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.hosting import engine_process_messages
from ingot.runtime.hosting.engine_process_messages import Cancel, Connection, Lot, Open, Outputs, packed, unpack
from ingot.runtime.requests.engine_request import EngineRequest
from ingot.runtime.requests.sampler import NonFiniteLogits


def sent(*messages: object) -> list[object]:
    """What arrives."""
    ours, theirs = (Connection(each) for each in socket.socketpair())

    def send_all() -> None:
        for message in messages:
            ours.send(message)

    sender = threading.Thread(target=send_all)
    sender.start()
    try:
        return [theirs.receive() for _ in messages]
    finally:
        sender.join()
        ours.close()
        with pytest.raises(EOFError):
            theirs.receive()
        theirs.close()


def test_errors_keep_class_message_and_attributes() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, IngotError)]
    plain = [kind("what is wrong") for kind in kinds if kind is not errors.RecipeError]
    special = [
        RequestError("no", field="temperature"),
        Overloaded("full", 2.5),
        NonFiniteLogits("row 3 has NaN"),
        errors.RecipeError([errors.Problem("a.yaml", 3, "no")]),
    ]
    for before, after in zip([*plain, *special], sent(*plain, *special), strict=True):
        assert isinstance(after, IngotError)
        assert (type(after), str(after), vars(after)) == (type(before), str(before), vars(before))


def test_an_error_of_another_library_is_an_engine_error_with_its_name() -> None:
    (found,) = sent(OSError(5, "disk is gone"))
    assert isinstance(found, EngineError)
    assert str(found) == "OSError: [Errno 5] disk is gone"


def test_large_and_small_messages_arrive_whole_and_in_order() -> None:
    prompt = np.arange(500_000)
    request = EngineRequest(prompt, SamplingParams(), RequestOptions(), False, 2.5)
    opened = Open(1, request, 0.02, True)
    first, second, third = sent(Cancel(1), opened, Cancel(2))
    assert (first, third) == (Cancel(1), Cancel(2))
    assert isinstance(second, Open)
    assert np.array_equal(second.request.token_ids, prompt)
    assert astuple(replace(second.request, prompt="")) == astuple(replace(request, prompt=""))
    assert second._replace(request=request) == opened


def test_what_has_arrived_is_received_without_waiting_in_pieces_of_any_size() -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(theirs)
    data = b"".join(packed(message) for message in (Cancel(1), Cancel(2), Cancel("x" * 100_000)))  # type: ignore[arg-type]
    received: list[object] = []
    for begin in range(0, 100, 7):
        ours.sendall(data[begin : min(100, begin + 7)])
        received += connection.receive_some()
    assert received == [Cancel(1)]
    assert connection.receive_some() == []
    rest = threading.Thread(target=ours.sendall, args=(data[100:],))
    rest.start()
    assert connection.receive() == Cancel(2), "what is left over is not lost"
    while len(received) < 2:
        received += connection.receive_some()
    rest.join()
    assert received == [Cancel(1), Cancel("x" * 100_000)]  # type: ignore[arg-type]
    ours.close()
    with pytest.raises(EOFError):
        connection.receive_some()
    connection.close()


def connected() -> tuple[Connection, Connection]:
    ours, theirs = (Connection(each) for each in socket.socketpair())
    return ours, theirs


def test_messages_keep_their_order_and_no_sender_waits_for_the_reader() -> None:
    ours, theirs = connected()
    ours.send(Cancel(0))
    assert theirs.receive() == Cancel(0)
    long = Cancel("x" * 1_000_000)  # type: ignore[arg-type]
    sent_all = [Cancel(1), long, Cancel(2), *[Cancel(number) for number in range(10_000)]]
    assert ours.has_room()
    for message in sent_all:  # more than the socket has room for
        ours.send(message)
    assert not ours.has_room()
    assert [theirs.receive() for _ in sent_all] == sent_all
    ours.wait_for_room()
    assert ours.has_room()
    theirs.close()
    for _ in range(10):
        ours.send(Cancel(3))  # and nothing happens
    ours.wait_for_room()  # returns, although nothing can be sent
    ours.flush()
    assert ours.failure is None, "the other process ended it"
    ours.close()


def test_what_waits_for_a_process_that_does_not_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process_messages, "MOST_WAITING_BYTES", 1 << 20)
    ours, theirs = connected()
    large = Cancel("x" * 2_000_000)  # type: ignore[arg-type]
    assert ours.offer(large), "one message is taken whatever its size"
    assert not ours.offer(large)
    assert not ours.offer(Cancel(1)), "the large one waits"
    ours.send(Cancel(2))  # what must arrive is not bounded
    assert [theirs.receive() for _ in range(2)] == [large, Cancel(2)]
    ours.flush()
    taken = 0
    while ours.offer(Cancel("x" * 1000)):  # type: ignore[arg-type]
        taken += 1
    assert 1000 < taken < 1600, "the limit, and what the socket has room for"
    for _ in range(taken):
        theirs.receive()
    ours.flush()
    assert ours.offer(Cancel(3))
    assert theirs.receive() == Cancel(3)
    for end in (ours, theirs):
        end.close()


@pytest.mark.parametrize("is_blocking", [False, True])
def test_messages_arrive_whole_whatever_mode_an_event_loop_gives_the_descriptor(is_blocking: bool) -> None:
    sockets = socket.socketpair()
    ours, theirs = (Connection(each) for each in sockets)
    large = [Cancel(text) for text in ("x" * 8_000_000, "y", "z" * 300_000, "")]  # type: ignore[arg-type]
    for each in sockets:
        os.set_blocking(each.fileno(), is_blocking)
    received: dict[str, list[object]] = {"ours": [], "theirs": []}

    def receive(name: str, connection: Connection) -> None:
        received[name] = [connection.receive() for _ in large]

    readers = [threading.Thread(target=receive, args=each) for each in (("ours", ours), ("theirs", theirs))]
    for message in large:
        for end in (ours, theirs):
            end.send(message)
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
    for end in (ours, theirs):
        end.close()
    assert received == {"ours": large, "theirs": large}


def test_outputs_of_a_choice_travel_as_one() -> None:
    scored = SampledToken(4, -0.5, (TokenLogprob(4, -0.5), TokenLogprob(9, -1.5)))
    lot = Lot(RequestOutput(3, "a", (SampledToken(1),), index=1))
    assert unpack(lot.packed()) == RequestOutput(3, "a", (SampledToken(1),), index=1)
    lot.add(RequestOutput(3, "bc", (SampledToken(2), scored), index=1))
    (arrived,) = sent(Outputs([(8, lot.packed())], None))  # type: ignore[arg-type]
    assert isinstance(arrived, Outputs)
    key, packed = arrived.items[0]
    assert key == 8
    assert not isinstance(packed, Exception)
    assert unpack(packed) == RequestOutput(3, "abc", (SampledToken(1), SampledToken(2), scored), index=1)
