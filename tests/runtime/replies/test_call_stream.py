"""Readers of tool calls."""

import gc
import weakref

from ingot.runtime.replies.call_stream import CallShape, JsonCalls, ToolCall


def test_a_reader_is_freed_without_a_collection() -> None:
    """One for each call of a reply: collections of all objects are rare in a server."""
    reader = CallShape(name_key="name", arguments_key="arguments").reader("", [])
    assert isinstance(reader, JsonCalls)
    gc.disable()
    try:
        text = '{"name": "f", "arguments": {"a"'
        assert reader.feed(text, 0) == len(text)
        assert reader.take() == [ToolCall("f", '{"a"')]
        left = weakref.ref(reader)
        del reader
        assert left() is None
    finally:
        gc.enable()
