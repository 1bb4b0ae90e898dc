"""`ingot run`: generates from one prompt, from a file of prompts, or from what is typed at the terminal."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import click

from ingot.artifact import open_artifact
from ingot.cli.command import naming_options
from ingot.cli.engine_options import engine_options
from ingot.cli.runtime.generation_params import constraint_of, generation_params
from ingot.cli.runtime.generation_stats import completion_facts, flush_to_disk, pace, print_stats, stats_facts
from ingot.cli.runtime.prompt_loop import PromptLoop
from ingot.cli.runtime.prompts_file import read_prompts, write_results
from ingot.cli.terminal.console import print_json, print_note
from ingot.errors import RequestError, UsageError
from ingot.runtime import BeamParams, Completion, Engine, RequestOptions, RequestOutput, SamplingParams
from ingot.runtime.requests.engine_request import GenerationParams


def run_command(
    artifact: str,
    prompt: str | None,
    prompts_file: str | None,
    output: Path | None,
    chat: bool | None,
    system: str | None,
    stats: bool,
    speculate: str | None,
    processes: Mapping[str, int | None],
    adapter: Path | None,
    settings: tuple[str, ...],
    beam_width: int | None,
    length_penalty: float | None,
    schema: Path | None,
    regex: str | None,
    grammar: Path | None,
    no_history: bool,
    no_verify: bool,
    as_json: bool,
    **sampling: object,
) -> int:
    """Generate from ARTIFACT; returns the exit code."""
    if output is not None and prompts_file is None:
        raise UsageError("--output is the file for the results of --prompts-file; add --prompts-file FILE")
    with naming_options():
        constraint = constraint_of(schema, regex, grammar)
        sampled = SamplingParams(**sampling, constraint=constraint)  # type: ignore[arg-type]  # click checked the types; values are checked there
        params = generation_params(sampled, beam_width, length_penalty)
    _refuse_drafts_of_beams(params, speculate)
    name = adapter.resolve().name or str(adapter) if adapter else None
    options = {**engine_options(settings, speculate, processes), "adapters": {name: adapter} if adapter else {}}
    asked = RequestOptions(adapter=name)
    if prompts_file is not None:
        _refuse_second_source(prompt)
        prompts = read_prompts(prompts_file, params, bool(chat), system)
        with _load(artifact, no_verify, options) as engine:
            return 1 if write_results(engine, prompts, output, stats, asked) else 0
    if prompt is None and _is_terminal(sys.stdin):
        _require_terminal_for_answers(as_json)
        answering = _for_one_answer(params)
        with _load(artifact, no_verify, options) as engine:
            loop = PromptLoop(engine, answering, chat, system, shows_stats=stats, options=asked)
            loop.run(keeps_history=not no_history)
        return 0
    if system is not None and not chat:
        raise UsageError("--system requires --chat; add --chat, or put the text into the prompt")
    text = _standard_input() if prompt in (None, "-") else str(prompt)
    with _load(artifact, no_verify, options) as engine:
        request = engine.encode_chat(_messages(text, system)) if chat else text
        if as_json:
            facts = completion_facts(_complete(engine, request, params, asked))
            if stats:
                flush_to_disk(engine)
            print_json(facts | ({"engine": stats_facts(engine.metrics())} if stats else {}))
        else:
            if isinstance(params, BeamParams):
                _print_best(engine, request, params, asked)
            else:
                _stream(engine, request, params, asked)
            if stats:
                flush_to_disk(engine)
                print_stats(engine)
    return 0


def _load(artifact: str, no_verify: bool, options: Mapping[str, Any]) -> Engine:
    """Open and load the artifact; one that no gate has passed is named as such first."""
    opened = open_artifact(artifact, verify=not no_verify)
    if opened.manifest.warning:
        print_note(opened.manifest.warning)
    return Engine.load(opened, **options)


def _refuse_second_source(prompt: str | None) -> None:
    if prompt is not None:
        raise UsageError("both PROMPT and --prompts-file are given; give one of them")


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether a standard stream is a terminal; a closed one is None."""
    return stream is not None and not stream.closed and stream.isatty()


def _require_terminal_for_answers(as_json: bool) -> None:
    if as_json or not _is_terminal(sys.stdout):
        what = "--json" if as_json else "output that is not a terminal"
        raise UsageError(f"{what} requires a prompt: give PROMPT, - to type one on standard input, or --prompts-file")


def _for_one_answer(params: GenerationParams) -> SamplingParams:
    """The parameters, if they suit answers that are streamed at a terminal."""
    if isinstance(params, BeamParams):
        raise UsageError(
            f"--beam-width {params.width} requires a prompt: give PROMPT, or --prompts-file; a chat streams its"
            " answers, and a beam search knows its sequence at the end"
        )
    if params.n > 1:
        raise UsageError(
            f"--n {params.n} requires a prompt: give PROMPT, or --prompts-file; a chat has one answer each"
        )
    return params


def _refuse_drafts_of_beams(params: GenerationParams, speculate: str | None) -> None:
    if isinstance(params, BeamParams) and speculate is not None:
        raise UsageError(
            f"--speculate {speculate} drafts tokens of one sequence, and --beam-width {params.width} computes several;"
            " leave out one of them"
        )


def _standard_input() -> str:
    if sys.stdin is None or sys.stdin.closed:
        raise RequestError("standard input is closed, so there is no prompt; give PROMPT or --prompts-file FILE")
    if sys.stdin.isatty():
        print_note("reading the prompt from the terminal; end it with Ctrl-D")
    try:
        text = sys.stdin.read()
        text.encode()  # a locale may let Python read bytes that are not text as halves of surrogate pairs
    except UnicodeDecodeError as error:
        raise _not_text(error.object[error.start], error.encoding) from error
    except UnicodeEncodeError as error:
        raise _not_text(ord(error.object[error.start]) & 0xFF, "utf-8") from error
    return text


def _not_text(byte: int, encoding: str) -> RequestError:
    return RequestError(f"standard input is not {encoding} text (byte {byte:#x}); pass text as the prompt")


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    user = {"role": "user", "content": text}
    return [{"role": "system", "content": system}, user] if system is not None else [user]


def _complete(
    engine: Engine, prompt: str | Sequence[int], params: GenerationParams, options: RequestOptions
) -> Completion:
    if isinstance(params, BeamParams):
        return engine.beam_search(prompt, params, options=options)
    return engine.generate(prompt, params, options=options)


def _print_best(engine: Engine, prompt: str | Sequence[int], params: BeamParams, options: RequestOptions) -> None:
    """Print the best sequence, which is known when the search ends."""
    best = engine.beam_search(prompt, params, options=options)
    click.echo(f"{prompt if isinstance(prompt, str) else ''}{best.text}")
    score = "" if best.score is None else f"; score {best.score:.3f}, the best of {params.width} beams"
    print_note(f"{pace(best)}{score}")


def _stream(engine: Engine, prompt: str | Sequence[int], params: SamplingParams, options: RequestOptions) -> None:
    outputs = engine.stream(prompt, params, options=options)  # refuses a bad prompt before anything is printed
    if params.n > 1:
        _print_choices(outputs, prompt if isinstance(prompt, str) else "")
        return
    if isinstance(prompt, str):
        click.echo(prompt, nl=False)
    last = None
    for output in outputs:
        click.echo(output.text, nl=False)
        sys.stdout.flush()
        last = output
    click.echo()
    if last is not None and last.completion is not None:
        print_note(pace(last.completion))


def _print_choices(outputs: Iterable[RequestOutput], prompt: str) -> None:
    """Print each choice under a heading, in order of index, as soon as it and those before it are complete."""
    done: dict[int, Completion] = {}
    num_shown = 0
    for output in outputs:
        if output.completion:
            done[output.index] = output.completion
        while num_shown in done:
            choice = done[num_shown]
            click.echo(f"--- choice {num_shown}, seed {choice.seed}\n{prompt}{choice.text}")
            sys.stdout.flush()
            print_note(pace(choice))
            num_shown += 1
