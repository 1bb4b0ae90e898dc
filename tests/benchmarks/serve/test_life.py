"""The end of a stream, by all that arrived of it, and what a run reports as faults."""

from benchmarks.serve.life import faults, kind_of

from tests.each_case import each_case

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'18\r\ndata: {"choices": []}\n\n\r\n'
ERROR = b'1b\r\ndata: {"error": {"message"}}\n\n\r\n'
END = b"0\r\n\r\n"


@each_case(
    ("answer", "kind"),
    [
        (HEAD + EVENT + b"e\r\ndata: [DONE]\n\n\r\n" + END, "whole"),
        (HEAD + EVENT + ERROR + END, "error"),
        (b'HTTP/1.1 503 Service Unavailable\r\n\r\n{"error": {"message": "down"}}', "error"),
        (HEAD + EVENT, "broken"),
        (HEAD + EVENT + END, "broken"),
        (b"", "broken"),
    ],
)
def test_a_stream_is_whole_ends_with_an_error_or_is_broken(answer: bytes, kind: str) -> None:
    assert kind_of(answer) == kind


def test_faults_are_broken_streams_failed_requests_of_a_swap_and_bad_artifacts_that_were_kept() -> None:
    whole = {"broken": 0, "hung": 0, "error": 0, "state": "given_up", "reason": "slow"}
    bad = ("damaged file", "failed gates", "slow", "engine killed on probation")
    cases = {name: dict(whole) for name in ("sigterm", "engine killed", "swap", *bad)}
    cases["swap"]["state"] = "kept"
    assert not faults(cases)
    cases["engine killed"] |= {"hung": 1, "error": 9}
    cases["swap"] |= {"error": 2, "state": "given_up"}
    cases["slow"]["state"] = "kept"
    assert faults(cases) == [
        "engine killed: 0 broken, 1 hung",
        "swap: 2 requests failed",
        "swap: the artifact is given_up: slow",
        "slow: it was kept",
    ]
