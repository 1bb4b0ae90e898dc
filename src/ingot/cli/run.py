"""`ingot run`: generates text from an artifact and streams it."""

import sys

import click

from ingot.artifact import open_artifact
from ingot.cli.console import print_json, print_note
from ingot.errors import RequestError, UsageError
from ingot.runtime import Completion, Engine, SamplingParams


@click.command("run")
@click.argument("artifact", type=click.Path())
@click.argument("prompt", default="-")
@click.option("--max-tokens", default=128, show_default=True, help="Most tokens to generate.")
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", default=0, show_default=True, help="Keep the k likeliest tokens; 0 keeps all.")
@click.option("--top-p", default=1.0, show_default=True, help="Keep the likeliest tokens of this total probability.")
@click.option("--min-p", default=0.0, show_default=True, help="Drop tokens below this share of the likeliest one's.")
@click.option("--seed", type=int, help="Same seed, same text.")
@click.option("--repetition-penalty", default=1.0, show_default=True, help="Above 1 penalizes repeated tokens.")
@click.option("--presence-penalty", default=0.0, show_default=True, help="Above 0 penalizes generated tokens.")
@click.option("--stop", multiple=True, help="Stop before this text; can be repeated.")
@click.option("--chat", is_flag=True, help="Treat PROMPT as a user message, with the model's chat template.")
@click.option("--system", help="System message for --chat.")
@click.option("--no-verify", is_flag=True, help="Do not check the files' digests first.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of streaming.")
def run_command(
    artifact: str, prompt: str, chat: bool, system: str | None, no_verify: bool, as_json: bool, **sampling: object
) -> None:
    """Generate from ARTIFACT. PROMPT is text, or - to read standard input.

    \b
    Examples:
      ingot run artifacts/demo "def read_file(path):" --max-tokens 64
      ingot run artifacts/chat --chat "Why is the sky blue?" --temperature 0.7 --seed 1
    """
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
