"""`ingot run`: generates text from an artifact and streams it."""

import sys

import click

from ingot.artifact import open_artifact
from ingot.cli.console import print_json, print_note
from ingot.errors import RequestError, UsageError
from ingot.runtime import Completion, Engine, SamplingParams


def run_command(
    artifact: str, prompt: str, chat: bool, system: str | None, no_verify: bool, as_json: bool, **sampling: object
) -> None:
    """Generate from ARTIFACT. PROMPT is text, or - to read standard input."""
    if system is not None and not chat:
        raise UsageError("--system requires --chat; add --chat, or put the text into the prompt")
    params = SamplingParams(**sampling)  # type: ignore[arg-type]  # click checked the types; values are checked there
    text = _standard_input() if prompt == "-" else prompt
    with Engine.load(open_artifact(artifact, verify=not no_verify)) as engine:
        request = engine.encode_chat(_messages(text, system)) if chat else text
        if as_json:
            print_json(_facts(engine.generate(request, params)))
        else:
            _stream(engine, request, params)


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        found = f"byte {error.object[error.start]:#x}"
        raise RequestError(f"standard input is not {error.encoding} text ({found}); pass text as the prompt") from error


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    user = {"role": "user", "content": text}
    return [{"role": "system", "content": system}, user] if system is not None else [user]


def _stream(engine: Engine, prompt: str | list[int], params: SamplingParams) -> None:
    outputs = engine.stream(prompt, params)  # refuses a bad prompt before anything is printed
    if isinstance(prompt, str):
        click.echo(prompt, nl=False)
    last = None
    for output in outputs:
        click.echo(output.text, nl=False)
        sys.stdout.flush()
        last = output
    click.echo()
    if last is not None and last.completion is not None:
        print_note(_summary(last.completion))


def _summary(done: Completion) -> str:
    metrics = done.metrics
    pace = f", {1 / metrics.tpot_seconds:.0f} tokens/s" if metrics.tpot_seconds else ""
    first = f"; first token after {metrics.ttft_seconds * 1e3:.0f} ms" if metrics.ttft_seconds else ""
    return f"{len(done.token_ids)} tokens, {done.finish_reason}{first}{pace}"


def _facts(done: Completion) -> dict[str, object]:
    return {
        "text": done.text,
        "token_ids": list(done.token_ids),
        "finish_reason": done.finish_reason,
        "prompt_tokens": done.prompt_tokens,
        "cached_tokens": done.cached_tokens,
        "ttft_seconds": done.metrics.ttft_seconds,
        "tpot_seconds": done.metrics.tpot_seconds,
        "e2e_seconds": done.metrics.e2e_seconds,
    }
