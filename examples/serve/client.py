"""Ask a running `ingot serve` with OpenAI's client: python examples/serve/client.py [BASE_URL] [MODEL]

Prints a whole answer with its log-probabilities, a stream with its usage, and three streams at once. After a 429 or 503
the client itself waits for as long as the server says, and tries again.
"""

import asyncio
import sys

import openai

PROMPT = "def read_file(path):"


def answer(client: openai.OpenAI, model: str) -> None:
    """Print one answer, and how likely each of its tokens was."""
    done = client.completions.create(model=model, prompt=PROMPT, max_tokens=16, temperature=0, logprobs=1)
    (choice,) = done.choices
    print(f"{PROMPT}{choice.text}")
    if choice.logprobs:
        print([round(logprob, 2) for logprob in choice.logprobs.token_logprobs or [] if logprob is not None])


def stream(client: openai.OpenAI, model: str) -> None:
    """Print an answer as it arrives. Fields that OpenAI does not have go into extra_body."""
    chunks = client.completions.create(
        model=model,
        prompt="import os",
        max_tokens=48,
        temperature=0.8,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"min_p": 0.02, "timeout_seconds": 30},
    )
    for chunk in chunks:
        if chunk.choices:
            print(chunk.choices[0].text, end="", flush=True)
        if chunk.usage:
            print(f"\n{chunk.usage.completion_tokens} tokens")


async def streams(base_url: str, model: str) -> None:
    """Read three streams at once."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=5) as client:

        async def one(prompt: str) -> str:
            chunks = await client.completions.create(model=model, prompt=prompt, max_tokens=24, stream=True)
            return prompt + "".join([chunk.choices[0].text async for chunk in chunks if chunk.choices])

        for text in await asyncio.gather(*map(one, ("class ", "for ", "with open("))):
            print(repr(text))


def main(base_url: str = "http://127.0.0.1:8000/v1", model: str | None = None) -> None:
    """Ask the first model that the server has, or the one that is named."""
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=5) as client:
        name = model or next(iter(client.models.list())).id
        answer(client, name)
        stream(client, name)
    asyncio.run(streams(base_url, name))


if __name__ == "__main__":
    main(*sys.argv[1:])
