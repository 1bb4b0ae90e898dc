"""Replies to chats with published templates by a model without an opinion: the hardest judge of a grammar.

python -m benchmarks.structured.chat_replies                     # all templates, 50 seeds of each kind of reply
python -m benchmarks.structured.chat_replies --seeds 4           # small
python -m benchmarks.structured.chat_replies --output FILE       # the result as JSON

Each reply is read twice: by Ingot's reader, and strictly by the format that the constraint spells. Odd seeds have
a tokenizer whose delimiters are special tokens, where reasoning is likely to end; with even seeds they are plain text,
and the request turns reasoning off. Exit code 1 when a reply was invalid or read wrongly.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
from tests.data_paths import DEMO_MODEL
from tests.simulators.fake_executor import FakeExecutor

from benchmarks.device import device_facts
from benchmarks.paths import ROOT
from ingot.errors import RequestError
from ingot.runtime.asking.outputs import Completion
from ingot.runtime.asking.sampling_params import SamplingParams
from ingot.runtime.constraints import Constraint
from ingot.runtime.engine.engine import Engine
from ingot.runtime.server.api.request_schemas import ChatRequest
from ingot.runtime.server.models.chat import Chat, ModelReplies, ReplyMessage, ReplyPlan
from ingot.runtime.text.tokenizer import Tokenizer

KINDS = ("json_schema", "choice", "required", "named", "none")
CHOICES = ["yes", "no", '{"name": "f"}', "<think>", "<tool_call>"]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome", "</think>"]},
        "id": {"type": "integer", "format": "int64", "minimum": 0, "maximum": 2**63 - 1},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2, "uniqueItems": False},
        "rate": {"enum": [0.5, 12345678901234567890]},
    },
    "required": ["city", "id"],
    "additionalProperties": False,
}
PARAMETERS = {"now": {"type": "object", "additionalProperties": False}, "weather": SCHEMA}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS[name]}} for name in PARAMETERS]
NAMED = {"type": "function", "function": {"name": "weather"}}
_PLACE = {"type": "object", "properties": {"place": {"type": "string", "description": "where"}}, "required": ["place"]}
_SIMPLE_TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a place.", "parameters": _PLACE},
}
_DELIMITERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
_MOST_TOKENS = 3000
_FREE_TOKENS = 40
_ENDS_REASONING = 6.0  # added to the logit of its end: about one token in ten
_SHOWN = 10
_Call = tuple[str, str]  # name and arguments


@dataclass
class Counts:
    """Replies by what became of them."""

    replies: int = 0
    valid: int = 0
    invalid: int = 0
    misread: int = 0
    cut_short: int = 0
    with_reasoning: int = 0
    calls: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass
class Outcome:
    """Counts of each kind of reply, and what was wrong."""

    templates: int = 0
    counts: dict[str, Counts] = field(default_factory=lambda: {kind: Counts() for kind in KINDS})
    problems: list[str] = field(default_factory=list)


def run(templates: Sequence[Path], seeds: int, kinds: Sequence[str] = KINDS) -> Outcome:
    """Generate and check the replies."""
    outcome = Outcome()
    for path in templates:
        outcome.templates += 1
        for is_special in (False, True):
            numbers = range(int(is_special), seeds, 2)
            if numbers:
                _run_template(path, kinds, numbers, is_special, outcome)
    return outcome


def _run_template(path: Path, kinds: Sequence[str], seeds: Sequence[int], is_special: bool, outcome: Outcome) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = _tokenizer(Path(folder), path.read_text(encoding="utf-8"), is_special)
        executor = FakeExecutor(
            vocab_size=tokenizer.vocab_size,
            num_blocks=4096,
            context_tokens=16_384,
            max_batch_tokens=512,
            eos_token_ids=(0,),
        )
        with Engine(executor, tokenizer) as engine:
            replies = ModelReplies(tokenizer)
            for kind in kinds:
                case = _Case(f"{path.name} {kind}", kind, tokenizer, replies, reasons=is_special)
                for seed, completion in zip(seeds, engine.generate(*case.requests(seeds)), strict=True):
                    case.check(seed, completion, outcome)


def _tokenizer(folder: Path, template: str, is_special: bool) -> Tokenizer:
    """The demo model's, with a chat template, and with delimiters as special tokens if `is_special`."""
    data = json.loads((DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    if is_special:
        first = len(data["model"]["vocab"])
        data["added_tokens"] += [
            {**data["added_tokens"][0], "id": first + number, "content": text}
            for number, text in enumerate(_DELIMITERS)
        ]
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}')
    return Tokenizer.load(folder)


class _Case:
    """One kind of reply with one template."""

    def __init__(self, name: str, kind: str, tokenizer: Tokenizer, replies: ModelReplies, *, reasons: bool) -> None:
        self._name = name
        self._kind = kind
        self._replies = replies
        self._reasons = reasons
        self._tokenizer = tokenizer
        body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
        if not reasons:
            body["reasoning_effort"] = "none"
        if kind in ("required", "named", "none"):
            body |= {"tools": TOOLS, "tool_choice": NAMED if kind == "named" else kind}
        self._chat = ChatRequest.model_validate(body).chat
        self._prompt = _prompt(tokenizer, self._chat)
        self._plan = self._planned()

    def _planned(self) -> ReplyPlan:
        answers = {"json_schema": Constraint.json_schema(SCHEMA), "choice": Constraint.choice(CHOICES)}
        return self._replies.plan(
            self._prompt,
            self._chat.tools,
            must_call=self._chat.must_call,
            many_calls=self._chat.many_calls,
            may_reason=self._chat.may_reason,
            answer=answers.get(self._kind),
        )

    def requests(self, seeds: Sequence[int]) -> tuple[list[list[int]], list[SamplingParams]]:
        """A prompt and parameters for each seed."""
        closing = self._tokenizer.special_tokens.get("</think>")
        params = [
            SamplingParams(
                max_tokens=_FREE_TOKENS if self._kind == "none" else _MOST_TOKENS,
                temperature=1.0,
                seed=seed,
                constraint=self._plan.constraint,
                logit_bias={} if closing is None else {closing: _ENDS_REASONING},
                keep_special_tokens=self._plan.keep_special_tokens,
            )
            for seed in seeds
        ]
        return [self._prompt] * len(seeds), params

    def check(self, seed: int, completion: Completion, outcome: Outcome) -> None:
        """Count one reply."""
        counts = outcome.counts[self._kind]
        counts.replies += 1
        choice = completion.choices[0]
        reader = self._plan.reader()
        message = reader.read(choice.text, is_last=True) if reader else ReplyMessage(choice.text, "", [])
        counts.with_reasoning += bool(message.reasoning)
        counts.calls += len(message.calls)
        is_cut = choice.finish_reason != "stop" and self._kind != "none"
        verdict, wrong = ("cut_short", "it was cut short") if is_cut else self._verdict(choice.text, message)
        setattr(counts, verdict, getattr(counts, verdict) + 1)
        if verdict != "valid":
            outcome.problems.append(f"{self._name} seed {seed}: {wrong}: {choice.text!r}")

    def _verdict(self, text: str, message: ReplyMessage) -> tuple[str, str]:
        """The count that a complete reply belongs to, and what is wrong with it."""
        try:
            strict = self._strictly(text, message)
        except ValueError as error:
            return "invalid", str(error)
        if problem := self._problem(*strict):
            return "invalid", problem
        read = message.content, _calls(message)
        return ("valid", "") if read == strict else ("misread", f"it was read as {message}")

    def _problem(self, content: str, calls: Sequence[_Call]) -> str | None:
        """Why a reply is not what was asked for."""
        names = [name for name, _ in calls]
        if self._kind in ("required", "named"):
            if content:
                return f"a required call has the content {content!r}"
            if not names or (self._kind == "named" and names != ["weather"]):
                return f"it calls {names}"
            return next((why for name, arguments in calls if (why := _invalid(arguments, PARAMETERS.get(name)))), None)
        if names:
            return f"it calls {names}, which nothing allows"
        if self._kind == "choice":
            return None if content in CHOICES else f"{content!r} is not a choice"
        return _invalid(content, SCHEMA) if self._kind == "json_schema" else None

    def _strictly(self, text: str, message: ReplyMessage) -> tuple[str, list[_Call]]:
        """Content and calls of a text, read strictly as the constraint spells it; a free one as the reader does."""
        if self._kind == "none":
            return message.content, _calls(message)
        is_open = self._tokenizer.decode(self._prompt[-8:], skip_special_tokens=False).rstrip().endswith("<think>")
        if is_open or (text.startswith("<think>") and "</think>" in text):
            text = text.partition("</think>")[2].lstrip()
        if self._kind in ("json_schema", "choice"):
            return text, []
        return "", self._spelled(text)

    def _spelled(self, text: str) -> list[_Call]:
        """Calls of a text that consists of them alone. ValueError for another."""
        syntax, found = self._replies.call_syntax, list[_Call]()
        begin, end = (syntax.begin, syntax.end)
        rest = text
        while True:
            if syntax.wraps_each or not found:
                rest = _without(rest, begin)
            value, length = json.JSONDecoder().raw_decode(rest)
            found.append((value["name"], json.dumps(value[syntax.arguments_key])))
            rest = rest[length:]
            if syntax.wraps_each:
                rest = _without(rest, end)
            if not (rest and syntax.separator and rest.startswith(syntax.separator)):
                break
            rest = _without(rest, syntax.separator)
        if rest != ("" if syntax.wraps_each else end):
            raise ValueError(f"{rest!r} follows the calls in {text!r}")
        return found


def _without(text: str, beginning: str) -> str:
    if not text.startswith(beginning):
        raise ValueError(f"{text!r} does not begin with {beginning!r}")
    return text[len(beginning) :]


def _calls(message: ReplyMessage) -> list[_Call]:
    """Calls of a message, with their arguments as one text each."""
    return [(call["function"]["name"], _respelled(call["function"]["arguments"])) for call in message.calls]


def _respelled(text: str) -> str:
    """JSON text without its own white space; a text that is not JSON as it is."""
    try:
        return json.dumps(json.loads(text))
    except ValueError:
        return text


def _invalid(text: str, schema: Mapping[str, Any] | None) -> str | None:
    try:
        jsonschema.validate(json.loads(text), schema if schema is not None else False)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{text!r} is not valid ({str(error).splitlines()[0]})"
    return None


def _prompt(tokenizer: Tokenizer, chat: Chat) -> list[int]:
    """Tokens of a chat. Some templates render conversations with tools alone, only tools of a simple kind, or none."""
    variables = {"functions": "[]", "datetime": "today", **(chat.variables or {})}
    for tools in (chat.tools or None, [_SIMPLE_TOOL]):
        try:
            return tokenizer.encode_chat(chat.messages, tools=tools, **variables)
        except RequestError:
            continue
    return tokenizer.encode_chat(chat.messages, **variables)


def main(arguments: list[str]) -> int:
    """Run and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = Path(os.environ.get("INGOT_TEST_DATA") or ROOT.parent / "shared" / "data")
    parser.add_argument("--templates", type=Path, default=data / "golden" / "chat-templates", help="folder of .jinja")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    templates = sorted(given.templates.glob("*.jinja"))
    if not templates:
        parser.error(f"{given.templates} has no .jinja files; give --templates, or set INGOT_TEST_DATA")
    started = time.monotonic()
    outcome = run(templates, given.seeds)
    record = {
        "device": device_facts(),
        "seeds": given.seeds,
        **asdict(outcome),
        "total": asdict(sum(outcome.counts.values(), Counts())),
        "seconds": round(time.monotonic() - started, 1),
    }
    print(*outcome.problems[:_SHOWN], sep="\n", file=sys.stderr)
    print(json.dumps(record, indent=1))
    if given.output:
        given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(bool(outcome.problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
