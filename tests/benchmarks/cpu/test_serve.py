"""The server's benchmark counts every token on both sides, and refuses an answer that is not a stream to its end."""

import asyncio

import pytest
from benchmarks.cpu.serve import in_process, lengths_of, over_http, prompts_of

from ingot.runtime import AsyncEngine
from tests.runtime.engines import text_engine
from tests.runtime.server.servers import running


def test_both_sides_serve_the_same_tokens() -> None:
    prompts = prompts_of(3, 5, 4096)
    lengths = lengths_of(1, 5, 7, are_equal=False)
    assert len(set(lengths)) > 1
    assert lengths_of(1, 5, 7, are_equal=True) == [7] * 5
    assert len({tuple(prompt) for prompt in prompts}) == 5

    async def own() -> int:
        async with AsyncEngine(text_engine()) as engine:
            outcome = await in_process(engine, prompts, 2, lengths)
            assert outcome.tokens_per_second > outcome.ttft_seconds > 0
            return engine.metrics().output_tokens

    assert asyncio.run(own()) == sum(lengths)
    with running(text_engine()) as server:
        warm_up = server.model().engine.metrics().output_tokens
        assert over_http(server.url, prompts, 2, lengths).tokens_per_second > 0
        assert server.model().engine.metrics().output_tokens - warm_up == sum(lengths)
        with pytest.raises(RuntimeError, match=r"the server answered b'HTTP/1\.1 400"):
            over_http(server.url, [[99999]], 1, [7])
