"""Random hostile constraints, compiled and followed as a serving process would: does one crash or stop it?

python -m benchmarks.structured.attack --seconds 600 --seed 1 --output FILE

A constraint is random: a regular expression, a grammar or a JSON schema, with the constructions that make compilers
slow or deep. A process of its own compiles it as an engine does, and follows what is accepted for hundreds of tokens,
some of the texts as deeply nested as the grammar allows. The process must not die, and no mask may take longer than
SLOWEST_SECONDS of processor time. Exit code 1 when one did; the constraint is printed, and is in the output.
"""

import argparse
import json
import multiprocessing
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from tests.runtime.constraints.grammars import END, allowed, spelled
from tests.runtime.engines import demo_tokenizer

from benchmarks.device import device_facts
from benchmarks.serve.large import hostile_constraints
from ingot.errors import IngotError, RequestError
from ingot.runtime.constraints import Constraint
from ingot.runtime.constraints.compiler import ConstraintCompiler
from ingot.runtime.constraints.matcher import ConstraintFailed, Matcher

SLOWEST_SECONDS = 0.2
_TOKENS = 400
_PATIENCE_SECONDS = 120.0
_SCHEMA_DEPTH = 4
_OPENING = b"([{"  # tokens of these alone nest
# One nested text in eight has so many tokens.
_NESTED_TOKENS = 10_000
_WALKS = ("random", "random", "nested")


class Followed(NamedTuple):
    """Masks of a constraint, the longest processor time of one, and why the constraint ended, if it did not go on."""

    masks: int = 0
    slowest_seconds: float = 0.0
    compile_seconds: float = 0.0
    refusal: str = ""
    failure: str = ""


def follow(compiler: ConstraintCompiler, constraint: Constraint, seed: int, num_tokens: int = _TOKENS) -> Followed:
    """Compile a constraint and follow several random texts of it, as a step does: masks, drafts, forced texts."""
    begun = time.process_time()
    try:
        grammar = compiler.compile(constraint)
    except RequestError as refused:
        return Followed(refusal=str(refused))
    found = Followed(compile_seconds=time.process_time() - begun)
    for number, walk in enumerate(_WALKS):
        rng = random.Random(seed * 10 + number)
        try:
            nests = walk == "nested"
            length = _NESTED_TOKENS if nests and seed % 8 == 0 else num_tokens
            found = _walk(grammar.matcher((END,)), rng, found, length, nests=nests)
        except ConstraintFailed as failed:
            found = found._replace(failure=str(failed))
    return found


@cache
def _opening_tokens() -> frozenset[int]:
    tokens = range(demo_tokenizer().vocab_size)
    return frozenset(token for token in tokens if spelled(token) and not spelled(token).strip(_OPENING))


def _walk(matcher: Matcher, rng: random.Random, found: Followed, num_tokens: int, *, nests: bool) -> Followed:
    for place in range(num_tokens):
        begun = time.process_time()
        mask = matcher.mask()
        took = time.process_time() - begun
        found = found._replace(masks=found.masks + 1, slowest_seconds=max(found.slowest_seconds, took))
        following = [token for token in allowed(mask) if token != END]
        if not following:
            break
        opening = [token for token in following if nests and token in _opening_tokens()]
        token = rng.choice(opening or following)
        if place % 5 == 0:
            forced = matcher.forced()
            drafts = forced[: matcher.num_allowed(forced)]
            matcher.prepare(drafts[:4])
            token = drafts[0] if drafts else token
        matcher.consume(token)
        if matcher.is_complete:
            break
    return found


def _number(rng: random.Random) -> int | float:
    return rng.choice(
        [
            *(0, 1, -1, 255, 2**31, -(2**31), 2**53, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**30),
            *(0.5, -0.0, 1e-300, 1e300, 1.7976931348623157e308, 5e-324, 0.1, 1e22, rng.randrange(10**6)),
        ]
    )


def _count(rng: random.Random) -> int:
    return rng.choice([0, 1, 2, 3, 7, 20, 100, 1000, 30_000, 2**31, 2**32 + 1])


def pattern(rng: random.Random, depth: int = 5) -> str:
    """A random regular expression, some with counts and classes that make large automata."""
    if depth == 0 or rng.random() < 0.15:
        return rng.choice(
            [
                "a",
                "b",
                ".",
                r"\d",
                r"\w",
                r"\p{L}",
                r"[^\n]",
                "[a-z]",
                "é",
                r"[\x{100}-\x{10ffff}]",
                "(?i:straße)",
                "abc",
            ]
        )
    inner = pattern(rng, depth - 1)
    match rng.randrange(8):
        case 0:
            return f"({inner}|{pattern(rng, depth - 1)})"
        case 1:
            return f"({inner}){rng.choice('*+?')}"
        case 2:
            least = rng.choice([0, 1, 2, 10, 100, 1000])
            return f"({inner}){{{least},{rng.choice(['', str(least + rng.choice([0, 1, 5, 300, 5000]))])}}}"
        case 3:
            return f"{inner}{pattern(rng, depth - 1)}"
        case 4:
            return "|".join(pattern(rng, max(0, depth - 3)) for _ in range(rng.choice([2, 5, 30])))
        case 5:
            return f"({inner}).*{pattern(rng, depth - 1)}"
        case 6:
            return f"({inner})" * min(rng.choice([2, 4, 50, 400]), 1 + 5000 // len(inner))
        case _:
            return f"(.*{inner}.*){{{rng.choice([1, 2, 8, 30])}}}"


def _terminal(rng: random.Random) -> str:
    kind = rng.randrange(9)
    if kind == 0:
        return f"/{pattern(rng, rng.randrange(4)).replace('/', '')}/"
    if kind == 1:
        return f"%json {json.dumps(schema(rng, 2))}"
    if kind == 2:
        return json.dumps(rng.choice(["(", ")", "[", "]", "a", "aa", "é", "if", "\n"]), ensure_ascii=False)
    if kind == 3:
        return '%regex { "substring_chars": "' + "abc" * rng.choice([1, 20, 2000]) + '" }'
    if kind == 4:
        return f"/[^a]/{{{rng.choice([0, 1, 5])},{rng.choice([5, 50, 3000])}}}"
    return rng.choice(['"a"', '"b"', "/a+/", "/[a-z]+/", '"("', '")"'])


def grammar(rng: random.Random) -> str:
    """A random grammar whose rules refer to one another: left, right and middle recursion, ambiguity, long chains."""
    number = rng.choice([1, 2, 3, 5, 10, 40, 300, 2000])
    density = 0.9 if number > 100 else 0.5
    names = [f"r{n}" for n in range(number)]
    lines = [
        f"start: {names[0]}",
        *(f"{name}: {_expansion(rng, names, place, density)}" for place, name in enumerate(names)),
    ]
    if rng.random() < 0.15:
        lines.append(rng.choice(["%ignore /[ \\n]+/", "%ignore /a/", '%llguidance {"allow_invalid_utf8": true}']))
    return "\n".join(lines)


def _expansion(rng: random.Random, names: list[str], place: int, density: float) -> str:
    following = names[place + 1] if place + 1 < len(names) else '"z"'

    def symbol() -> str:
        if rng.random() < density:
            found = following if rng.random() < density else rng.choice(names)
        else:
            found = _terminal(rng)
        if found.startswith("%"):
            return found
        if rng.random() < 0.2:
            least = rng.choice([0, 1, 3])
            found += rng.choice(["?", "*", "+", f"{{{least},{least + rng.choice([0, 2, 60, 5000])}}}"])
        return found

    alternatives = [
        " ".join(symbol() for _ in range(rng.choice([1, 1, 2, 3]))) for _ in range(rng.choice([1, 1, 2, 4]))
    ]
    if rng.random() < 0.3:
        alternatives.append(_terminal(rng))
    if rng.random() < 0.1:
        alternatives.append("")
    return " | ".join(alternatives)


def schema(rng: random.Random, depth: int = _SCHEMA_DEPTH) -> Any:
    """A random JSON schema, with references, huge numbers and counts, patterns and many properties."""
    found = _schema(rng, depth)
    if isinstance(found, dict) and rng.random() < 0.6:
        found["$defs"] = {name: _schema(rng, 2) for name in "abc"}
        for name in "abc":
            if not isinstance(found["$defs"][name], dict):
                found["$defs"][name] = {"type": "integer"}
    return found


def _schema(rng: random.Random, depth: int) -> Any:
    if depth == 0 or rng.random() < 0.1:
        return _leaf(rng)
    inner = [_schema(rng, depth - 1) for _ in range(rng.choice([1, 2, 3]))]
    match rng.randrange(9):
        case 0:
            return {
                rng.choice(["anyOf", "oneOf", "allOf"]): inner
                * (rng.choice([1, 1, 20]) if depth == _SCHEMA_DEPTH else 1)
            }
        case 1:
            return {"type": "array", "items": inner[0], "minItems": _count(rng), "maxItems": _count(rng)}
        case 2:
            return {"type": "array", "prefixItems": inner, "items": rng.choice([False, inner[0]])}
        case 3:
            count = rng.choice([1, 3, 20, 300, 2000] if depth == _SCHEMA_DEPTH else [1, 3, 8])
            names = [f"key_{n}" for n in range(count)]
            found: dict[str, Any] = {"type": "object", "properties": {name: rng.choice(inner) for name in names}}
            found["required"] = rng.sample(names, rng.choice([0, count // 2, count]))
            return {**found, "additionalProperties": rng.choice([True, False, inner[0]])}
        case 4:
            return {"type": "object", "patternProperties": {pattern(rng, 2): inner[0]}, "additionalProperties": False}
        case 5:
            return {"type": "object", "additionalProperties": inner[0], "minProperties": _count(rng)}
        case 6:
            return {"allOf": [{"$ref": rng.choice(["#", *(f"#/$defs/{name}" for name in "abc")])}, inner[0]]}
        case 7:
            return {"anyOf": [{"$ref": rng.choice(["#", *(f"#/$defs/{name}" for name in "abc")])}, *inner]}
        case _:
            return {"type": "array", "items": {"$ref": rng.choice(["#", "#/$defs/a", "#/$defs/missing"])}}


def _leaf(rng: random.Random) -> Any:
    match rng.randrange(9):
        case 0:
            return {"const": rng.choice([_number(rng), "a" * 2000, None, [1, [2, {}]], {"a": _number(rng)}])}
        case 1:
            return {
                "enum": [_number(rng), "x", *(f"value {n}" for n in range(rng.choices([1, 50, 3000], (6, 6, 1))[0]))]
            }
        case 2:
            return {"type": "integer", "minimum": _number(rng), "maximum": _number(rng)}
        case 3:
            return {"type": "number", "exclusiveMinimum": _number(rng), "multipleOf": _number(rng)}
        case 4:
            return {"type": "string", "pattern": pattern(rng, 3)}
        case 5:
            return {"type": "string", "minLength": _count(rng), "maxLength": _count(rng)}
        case 6:
            return {
                "type": "string",
                "format": rng.choice(["date-time", "email", "uuid", "ipv6", "uri", "hostname", "x"]),
            }
        case 7:
            return {"type": "integer", "multipleOf": _number(rng)}
        case _:
            return rng.choice([{}, True, False, {"type": "null"}, {"type": ["integer", "string", "object"]}])


def _hostile(rng: random.Random) -> Constraint:
    fields = rng.choice([*hostile_constraints().values()]).body
    if "response_format" in fields:
        return Constraint.json_schema(fields["response_format"]["json_schema"]["schema"])
    return Constraint(*next(iter(fields["structured_outputs"].items())))


KINDS: dict[str, Callable[[random.Random], Constraint]] = {
    "regex": lambda rng: Constraint.regex(pattern(rng)),
    "grammar": lambda rng: Constraint.grammar(grammar(rng)),
    "json_schema": lambda rng: Constraint.json_schema(
        schema(rng), whitespace=rng.choice(["compact", "compact", "flexible"])
    ),
    "known": _hostile,
}


class _Follower:
    """A process that compiles and follows constraints, as an engine's."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_follow_all, args=(other,), daemon=False)
        self._process.start()
        other.close()

    def ask(self, constraint: Constraint, seed: int) -> Followed | str:
        """Return what a constraint did, or how the process ended by it."""
        self._connection.send((constraint, seed))
        if not self._connection.poll(_PATIENCE_SECONDS):
            return f"no answer in {_PATIENCE_SECONDS:g} s"
        try:
            found: Followed = self._connection.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode or 0
            return f"the process ended: {signal.Signals(-code).name if code < 0 else code}"
        return found

    def close(self) -> None:
        """End it."""
        self._connection.close()
        self._process.join(5)
        self._process.kill()
        self._process.join()


def _follow_all(connection: Connection) -> None:
    compiler = ConstraintCompiler(demo_tokenizer(), demo_tokenizer().vocab_size)
    with suppress(EOFError):
        while True:
            constraint, seed = connection.recv()
            connection.send(follow(compiler, constraint, seed))
    compiler.close()


def attack(seconds: float, seed: int, log: TextIO, most: int | None = None) -> dict[str, Any]:
    """Try random constraints for some time; figures, and what went wrong. The log has each before it is tried."""
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    slowest: list[tuple[float, str]] = []
    compiled: list[float] = []
    problems: list[dict[str, str]] = []
    process, until = _Follower(), time.monotonic() + seconds
    number = 0
    while time.monotonic() < until and (most is None or number < most):
        number += 1
        rng = random.Random(seed * 1_000_000 + number)
        kind = rng.choices([*KINDS], (4, 5, 5, 1))[0]
        try:
            constraint = KINDS[kind](rng)
        except IngotError:
            counts["refused before it is compiled"] += 1
            continue
        print(json.dumps({"number": number, "kind": kind, "source": constraint.source[:300]}), file=log, flush=True)
        found = process.ask(constraint, number)
        counts[kind] += 1
        if isinstance(found, str):
            problems.append({"problem": found, "kind": constraint.kind, "source": constraint.source})
            process.close()
            process = _Follower()
            continue
        counts["refused" if found.refusal else "followed"] += 1
        counts["masks"] += found.masks
        if found.refusal:
            refusals[found.refusal.partition("cannot be compiled: ")[2][:60]] += 1
            continue
        counts["ended by a limit"] += bool(found.failure)
        compiled.append(found.compile_seconds)
        slowest.append((found.slowest_seconds, constraint.source[:200]))
        if found.slowest_seconds > SLOWEST_SECONDS:
            problem = f"a mask took {found.slowest_seconds:.2f} s"
            problems.append({"problem": problem, "kind": constraint.kind, "source": constraint.source})
    process.close()
    times = np.array([took for took, _ in slowest] or [0.0])
    return {
        "counts": dict(counts),
        "refusals": dict(refusals.most_common(25)),
        "slowest_mask_seconds": {f"p{q}": float(np.percentile(times, q)) for q in (50, 90, 99, 100)},
        "compile_seconds": {f"p{q}": float(np.percentile(compiled or [0.0], q)) for q in (50, 90, 99, 100)},
        "slowest": sorted(slowest, reverse=True)[:5],
        "problems": problems,
    }


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = {"device": device_facts(), "seed": options.seed, **attack(options.seconds, options.seed, sys.stderr)}
    text = json.dumps(found, indent=1)
    if options.output:
        options.output.write_text(text)
    print(text[:12_000])
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
