"""Output queues: each output has one reader."""

from ingot.runtime.asking.outputs import OutputQueues, RequestOutput


def output(request_id: int, text: str = "") -> RequestOutput:
    return RequestOutput(request_id, text, ())


def test_a_request_with_its_own_queue_keeps_its_outputs_in_order() -> None:
    queues = OutputQueues()
    queues.open(1)
    for text in "ab":
        queues.put(output(1, text))
        queues.put(output(2, text))
    assert queues.take() == [output(2, "a"), output(2, "b")]
    assert [queues.next(1), queues.next(1), queues.next(1)] == [output(1, "a"), output(1, "b"), None]


def test_only_outputs_without_a_queue_of_their_own_count_for_take() -> None:
    queues = OutputQueues()
    queues.open(1)
    queues.put(output(1))
    assert not queues.has_any
    queues.put(output(2))
    assert queues.has_any
    queues.take()
    assert not queues.has_any


def test_closing_a_queue_drops_its_unread_outputs() -> None:
    queues = OutputQueues()
    queues.open(1)
    queues.put(output(1))
    queues.close(1)
    assert 1 not in queues
    assert queues.take() == []
