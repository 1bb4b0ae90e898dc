"""`ingot run --prompts-file`: many prompts in one batch, one JSON object per result, in the order of the file.

A file that ends in .jsonl or .ndjson has one object per line; any other has one prompt per line. Blank lines are
skipped. The keys of an object are

    prompt      a text or a list of token ids          messages   a conversation, instead of a prompt
    id          anything; repeated in the result       and any sampling parameter, such as max_tokens or temperature
    beam_width  searches with this many beams          length_penalty   of the search

A prompt that cannot be served gets a result with an `error`; the others are not affected.
"""

import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from ingot.cli.runtime.generation_params import BEAM_NAMES, SAMPLING_NAMES, with_values
from ingot.cli.runtime.generation_stats import completion_facts, flush_to_disk, print_batch_stats, print_stats
from ingot.cli.terminal.console import print_note
from ingot.cli.terminal.progress_display import progress_shown
from ingot.errors import IngotError, RequestError, UsageError, did_you_mean, one_of, shown
from ingot.progress import report_progress
from ingot.runtime import Completion, Engine, RequestOptions
from ingot.runtime.requests.engine_request import GenerationParams

JSONL_ENDINGS = (".jsonl", ".ndjson")
MOST_IN_FLIGHT = 256  # prompts that are given to the engine at a time, so that a file of any length fits memory

_PARAMETERS = (*SAMPLING_NAMES, *BEAM_NAMES)
_KEYS = ("prompt", "messages", "id", *_PARAMETERS)


@dataclass(frozen=True)
class FilePrompt:
    """A prompt or a conversation of one line, with its parameters."""

    line: int
    params: GenerationParams
    prompt: str | Sequence[int] | None = None
    messages: Sequence[Mapping[str, object]] | None = None
    id: object = None


def read_prompts(name: str, params: GenerationParams, is_chat: bool, system: str | None) -> list[FilePrompt]:
    """Read the prompts of a file, or of standard input for "-"; `params` are the defaults of their parameters.

    With `is_chat`, a text is a user's message; `system` begins each conversation. Raises UsageError, before any work,
    with every wrong line (at most ten are shown).
    """
    if system is not None and not is_chat:
        raise UsageError("--system requires --chat; add --chat, or write messages into the file")
    read = _record if name.lower().endswith(JSONL_ENDINGS) else _line
    found, problems = list[FilePrompt](), list[str]()
    for number, line in enumerate(_text_of(name).split("\n"), start=1):
        if line.strip():
            try:
                found.append(_as_chat(read(number, line, params), is_chat, system))
            except UsageError as error:
                problems.append(f"{name}:{number}: {error}")
    if problems:
        more = f"\n... and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise UsageError("\n".join(problems[:10]) + more)
    if not found:
        raise UsageError(f"{name}: the file has no prompts; write one per line, or JSON objects into a .jsonl file")
    return found


def _text_of(name: str) -> str:
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise UsageError(f"--prompts-file {name}: {error.strerror}; give a text file or a .jsonl file") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UsageError(f"{name}:{line}: byte {error.start} is not UTF-8; convert the file to UTF-8") from error


def _line(number: int, line: str, params: GenerationParams) -> FilePrompt:
    return FilePrompt(number, params, prompt=line)


def _record(number: int, line: str, params: GenerationParams) -> FilePrompt:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        where = f" in column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UsageError(f"invalid JSON{where}; write one object per line") from error
    if not isinstance(record, dict):
        raise UsageError(f'{shown(record)} is not an object; write {{"prompt": "..."}}')
    for key in record:
        if key not in _KEYS:
            raise UsageError(f"unknown key {shown(key)}; keys: {one_of(_KEYS)}.{did_you_mean(key, _KEYS)}")
    if ("prompt" in record) == ("messages" in record):
        raise UsageError("a record has either prompt or messages")
    messages = record.get("messages")
    if "messages" in record and not (isinstance(messages, list) and messages):
        raise UsageError(f"messages is {shown(messages)}; it must be a list with at least one message")
    given = {key: _as_parameter(value) for key, value in record.items() if key in _PARAMETERS}
    return FilePrompt(number, with_values(params, given), record.get("prompt"), messages, record.get("id"))


def _as_parameter(value: Any) -> Any:
    """A JSON value as SamplingParams takes it: JSON has strings where the keys of logit_bias are token ids."""
    if isinstance(value, dict):
        return {int(key) if key.isdecimal() else key: item for key, item in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _as_chat(prompt: FilePrompt, is_chat: bool, system: str | None) -> FilePrompt:
    """With --chat, turn a text into a user's message; begin the conversation with the system's."""
    if not is_chat:
        return prompt
    if prompt.prompt is not None and not isinstance(prompt.prompt, str):
        raise UsageError("token ids cannot be a message of --chat; give text or messages")
    turns = prompt.messages or [{"role": "user", "content": prompt.prompt}]
    opening = [{"role": "system", "content": system}] if system is not None else []
    return replace(prompt, prompt=None, messages=[*opening, *turns])


def write_results(
    engine: Engine,
    prompts: Sequence[FilePrompt],
    output: Path | None,
    shows_stats: bool,
    options: RequestOptions | None = None,
) -> int:
    """Generate for all prompts and write the results as they become available; returns how many failed.

    Without `output` they are written to stdout. With it, the file appears, complete, at the end.
    """
    done, num_failed, started = list[Completion](), 0, time.perf_counter()
    with _results_file(output) as file:
        for number, (prompt, outcome) in enumerate(_results(engine, prompts, options), start=1):
            num_failed += isinstance(outcome, IngotError)
            if isinstance(outcome, Completion):
                done.append(outcome)
            file.write(json.dumps(_facts(prompt, outcome), ensure_ascii=False) + "\n")
            file.flush()
            report_progress("prompts", number, len(prompts))
    if shows_stats:
        print_batch_stats(done, num_failed, time.perf_counter() - started)
        flush_to_disk(engine)
        print_stats(engine)
    return num_failed


@contextmanager
def _results_file(output: Path | None) -> Iterator[TextIO]:
    """Stdout, or FILE.partial, which is renamed to FILE at the end and kept, with a note, when the run is cut off."""
    if output is None:
        yield sys.stdout
        return
    partial = output.with_name(f"{output.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file, progress_shown():
            yield file
    except OSError as error:
        raise UsageError(f"--output {output}: {error.strerror}; give a file in a folder that can be written") from error
    except BaseException:
        print_note(f"the results so far are in {partial}")
        raise
    partial.replace(output)


def _results(
    engine: Engine, prompts: Sequence[FilePrompt], options: RequestOptions | None
) -> Iterator[tuple[FilePrompt, Completion | IngotError]]:
    """Each prompt with its completion or its error, in order; MOST_IN_FLIGHT of them are in the engine at a time."""
    upcoming = iter(prompts)
    queued = deque[tuple[FilePrompt, int | IngotError]]()
    completions: dict[int, Completion] = {}
    while True:
        for prompt in islice(upcoming, MOST_IN_FLIGHT - len(queued)):
            queued.append((prompt, _add(engine, prompt, options)))
        if not queued:
            return
        prompt, request = queued[0]
        if isinstance(request, IngotError):
            yield prompt, request
            queued.popleft()
        elif request in completions:
            completion = completions.pop(request)
            failed = next((choice.error for choice in completion.choices if choice.error), None)
            yield prompt, failed or completion
            queued.popleft()
        else:
            for output in engine.step():
                if output.result is not None:
                    completions[output.request_id] = output.result


def _add(engine: Engine, prompt: FilePrompt, options: RequestOptions | None) -> int | IngotError:
    """Queue a prompt; returns its request's id, or why it cannot be served."""
    try:
        given = prompt.prompt if prompt.messages is None else engine.encode_chat(prompt.messages)
        assert given is not None
        return engine.add(given, prompt.params, options=options)
    except RequestError as error:
        return error


def _facts(prompt: FilePrompt, outcome: Completion | IngotError) -> dict[str, object]:
    name = {} if prompt.id is None else {"id": prompt.id}
    if isinstance(outcome, IngotError):
        return {**name, "line": prompt.line, "error": str(outcome)}
    return {**name, "line": prompt.line, **completion_facts(outcome)}
