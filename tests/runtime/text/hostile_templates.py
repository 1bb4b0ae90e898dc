"""Chat templates of an adversary, and a program that renders them within limits of the operating system.

    python -m tests.runtime.text.hostile_templates

prints a JSON object: template's name -> [seconds of processor time, the outcome]. Each runs in a process of its own,
which is killed when it needs more than `CPU_SECONDS` or `MEMORY_BYTES`.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path

from ingot.errors import IngotError
from ingot.runtime.text.chat_template import ChatTemplate

CPU_SECONDS = 20
MEMORY_BYTES = 3 << 29  # 1.5 GiB of address space
MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


def grown(start: str, step: str, times: int = 60, end: str = "{{ ns.x | string | length }}") -> str:
    """A template that changes `ns.x` again and again."""
    start = f"{{% set ns = namespace(x={start}) %}}"
    return f"{start}{{% for i in range({times}) %}}{{% set ns.x = {step} %}}{{% endfor %}}{end}"


def loops(depth: int, body: str = "x", times: int = 100_000) -> str:
    """Nested loops."""
    start = "".join(f"{{% for i{level} in range({times}) %}}" for level in range(depth))
    return start + body + "{% endfor %}" * depth


BIG = "('ab' * 500000)"  # a megabyte
LIST = "range(90000) | list"

TIME = {
    "nested loops": loops(3),
    "nested empty loops": loops(4, ""),
    "nested loops of a false test": loops(1, "{% for j in range(99999) if false %}{% endfor %}"),
    "loops of a long list literal": loops(2, "{% set x = [" + "1," * 9000 + "] %}"),
    "loops of a long text": loops(2, "x" * 100_000),
    "loops in a macro": "{% macro m() %}" + loops(2) + "{% endmacro %}" + loops(1, "{{ m() }}"),
    "recursive macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursive macros": "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
    "branching macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}x{% endmacro %}{{ m(50) }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "branching loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "recursive call block": "{% macro m() %}{{ caller() }}{% endmacro %}"
    "{% macro r() %}{% call m() %}{{ r() }}{% endcall %}{% endmacro %}{{ r() }}",
    "slice filter": "{{ [1] | slice(10 ** 8) | list | length }}",
    "batch filter": "{{ [1] | batch(10 ** 9, 0) | list | length }}",
    "endless cycle": loops(2, "{{ loop.cycle(1, 2) }}"),
    "loop length": loops(2, "{{ loop.length }}"),
    "many attributes": loops(2, "{{ messages[0].content }}"),
    "many calls": loops(2, "{{ 'a'.upper() }}"),
    "many filters": loops(2, "{{ 'a b' | title }}"),
    "many undefined": loops(2, "{{ nothing }}"),
    "unpacked arguments": "{% set x = "
    + LIST
    + " %}"
    + loops(2, "{{ dict.fromkeys(*x) if false else cycler(*x).next() }}"),
    "unpacked filter arguments": "{% set x = " + LIST + " %}" + loops(2, "{{ 'a' | default(*x) }}"),
    "search from the end": loops(1, "{{ ('ab' * 99999).rfind('b' + 'ab' * 49999 + 'b') }}"),
    "split from the end": loops(1, "{{ ('ab' * 99999).rsplit('b' + 'ab' * 49999 + 'b') | length }}"),
    "partition from the end": loops(1, "{{ ('ab' * 99999).rpartition('bb' + 'ab' * 49999)[0] | length }}"),
    "search": loops(1, "{{ 'a' * 20000 + 'b' in 'a' * 90000 }}"),
    "strip of many characters": loops(1, "{{ ('a' * 200000).strip('b' * 200000 + 'a') }}"),
    "trim of many characters": loops(1, "{{ ('a' * 200000) | trim('b' * 200000 + 'a') }}"),
    "wordwrap of a long word": "{{ " + BIG + " | wordwrap(1) | length }}",
    "sums of lists": "{% set x = " + LIST + " | batch(1) | list %}" + loops(1, "{{ x | sum(start=[]) | length }}"),
    "list search": "{% set x = " + LIST + " %}" + loops(1, "{{ 'a' in x }}{{ x.index(89999) }}"),
    "equal trees": grown("[1]", "[ns.x, ns.x]", end="{{ ns.x == [ns.x[0], ns.x[1]] }}"),
    "ordered trees": grown("[1]", "[ns.x, ns.x]", end="{{ [ns.x, ns.x] | sort | length }}"),
    "tree in a list": grown("[1]", "[ns.x, ns.x]", end="{{ ns.x in [ns.x[0], [ns.x]] }}"),
    "chained comparison of trees": grown("[1]", "[ns.x, ns.x]", end="{{ ns.x == [ns.x[0], ns.x[1]] == 1 }}"),
    "tree as a key": grown("(1,)", "(ns.x, ns.x)", end="{{ {ns.x: 1} }}"),
    "tree as an index": grown("(1,)", "(ns.x, ns.x)", end="{{ {}[ns.x] }}"),
    "tree in an error": grown("[1]", "[ns.x, ns.x]", end="{{ [].index(ns.x) }}"),
    "tree as a message": grown("[1]", "[ns.x, ns.x]", end="{{ raise_exception(ns.x) }}"),
    "deep tuple as a key": grown("1", "(ns.x,)", 99_999, "{{ {ns.x: 1} }}"),
    "deep list": grown("1", "[ns.x]", 99_999),
    "deep list as JSON": grown("1", "[ns.x]", 99_999, "{{ ns.x | tojson }}"),
    "deep generators": grown("[1]", "ns.x | map('string')", 99_999, "{{ ns.x | list }}"),
    "deep slices": grown("[1]", "ns.x | batch(1)", 99_999, "{{ ns.x | list }}"),
    "attribute path": "{{ messages | map(attribute='a' ~ '.a' * 9999999) | list | length }}",
    "sorted by a path": "{{ messages | sort(attribute='a' ~ ',a' * 9999999) | list | length }}",
    "refund": "{{ messages | map('bounded pay', -10 ** 12) | list | length }}" + loops(3),
    "date format": loops(1, "{{ strftime_now('%c' * 500) }}"),
    "groups": loops(1, "{{ " + LIST + " | groupby('real') | length }}"),
    "sorted numbers": loops(1, "{{ " + LIST + " | sort | length }}"),
    "a long word of digits": "{{ ('9' * 99999999) | int }}",
    "round of a huge precision": "{{ 1 | round(-10 ** 9) }}",
    "round up to a huge precision": "{{ 1.5 | round(10 ** 9, 'ceil') }}",
}
MEMORY = {
    "text times number": "{{ 'a' * 10 ** 10 }}",
    "number times text": "{{ 10 ** 10 * 'a' }}",
    "list times number": "{{ ([1] * 10 ** 10) | length }}",
    "tuple times number": "{{ ((1,) * 10 ** 10) | length }}",
    "center filter": "{{ 'a' | center(10 ** 10) }}",
    "center method": "{{ 'a'.center(10 ** 10) }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "rjust": "{{ 'a'.rjust(10 ** 10, 'é') }}",
    "zfill": "{{ 'a'.zfill(10 ** 10) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 9) }}",
    "indent": "{{ 'a\nb' | indent(10 ** 10) }}",
    "indent of many lines": "{{ ('\n' * 99999) | indent(99999, true, true) | length }}",
    "indent by a text": "{{ ('a\n' * 99999) | indent('a' * 99999) | length }}",
    "format operator": "{{ '%10000000000d' % 1 }}",
    "format operator with a star": "{{ '%*d' % (10 ** 9, 1) }}",
    "format operator with a nested name": "{{ '%(a(b))9999999999d' % {'a(b)': 1} }}",
    "format operator with a precision": "{{ '%.2000000000f' % 1 }}",
    "format operator used again": "{{ ('%(a)s' * 9999) % {'a': 'x' * 99999} }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "format method": "{{ '{:>10000000000}'.format(1) }}",
    "format method, nested": "{{ '{:>{}}'.format(1, 10 ** 10) }}",
    "format method used again": "{{ ('{0}' * 9999).format('x' * 99999) | length }}",
    "format_map": "{{ '{a:>10000000000}'.format_map({'a': 1}) }}",
    "is odd, which formats": "{{ '%10000000000d' is odd }}",
    "divisible by, which formats": "{{ '%10000000000d' is divisibleby(3) }}",
    "doubling by +": grown("'ab'", "ns.x + ns.x"),
    "doubling by ~": grown("'ab'", "ns.x ~ ns.x"),
    "doubling by a list": grown("[1]", "ns.x + ns.x", end="{{ ns.x | length }}"),
    "doubling by a tree": grown("[1]", "[ns.x, ns.x]"),
    "doubling by a mapping": grown("{}", "{'a': ns.x, 'b': ns.x}", end="{{ ns.x | tojson | length }}"),
    "doubling by replace": grown("'a'", "ns.x.replace('a', 'aa')"),
    "doubling by the replace filter": grown("'a'", "ns.x | replace('a', 'aa')"),
    "doubling by join": grown("'ab'", "ns.x.join(['a', 'b', 'c'])"),
    "doubling by the join filter": grown("'ab'", "[ns.x, ns.x] | join(ns.x)"),
    "doubling by format": grown("'ab'", "'%s%s' % (ns.x, ns.x)"),
    "doubling by a block": grown(
        "'ab'",
        "ns.x",
        1,
        "{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    ),
    "doubling by a macro": "{% macro m(n) %}{% if n %}{% set y = m(n - 1) %}{{ y }}{{ y }}{% else %}ab{% endif %}"
    "{% endmacro %}{{ m(50) }}",
    "doubling by escapes": grown("'&'", "(ns.x ~ ns.x) | forceescape"),
    "doubling by safe texts": grown("'&' | safe", "ns.x + ('&' * 99999)", 99_999),
    "doubling by a slice": grown("'ab'", "ns.x[:] + ns.x[::-1]"),
    "doubling by JSON": grown("'\"'", "ns.x | tojson"),
    "doubling by repr": grown("['\\\\']", "[ns.x | string]"),
    "doubling by a number": grown("9", "ns.x * ns.x"),
    "JSON indent": "{{ [[[[1]]]] | tojson(indent=10 ** 10) }}",
    "JSON indent of text": "{{ [[1, 2] * 9999] | tojson(indent='x' * 99999) | length }}",
    "JSON separators": "{{ ([1] * 99999) | tojson(separators=[',' * 99999, ':']) | length }}",
    "power": "{{ 10 ** 10 ** 10 }}",
    "number as text": "{{ 10 ** 5000 | string }}",
    "number as text, grouped": "{{ (10 ** 5000) | string }}",
    "number in base 36": "{{ ('z' * 99999) | int(base=36) }}",
    "number in base 2": "{{ ('1' * 9999999) | int(0, 2) }}",
    "float as a number": "{{ 1e308 | int }}",
    "complex": "{{ ((-8) ** 0.5) }}",
    "lipsum": "{{ lipsum(10 ** 8) }}",
    "range": "{{ range(10 ** 9) | list | length }}",
    "many ranges": loops(1, "{% set ns.x = [ns.x, range(99999) | list] %}").join(["{% set ns = namespace(x=1) %}", ""]),
    "many pieces": "{% set ns = namespace(x=1) %}" + loops(1, "{% set ns.x = [ns.x, ('a ' * 99999).split()] %}"),
    "many lines": "{% set ns = namespace(x=1) %}" + loops(1, "{% set ns.x = [ns.x, ('é\n' * 99999).splitlines()] %}"),
    "many letters": "{% set ns = namespace(x=1) %}" + loops(1, "{% set ns.x = [ns.x, ('é' * 99999) | list] %}"),
    "many mappings": "{% set ns = namespace(x=1) %}" + loops(1, "{% set ns.x = [ns.x, dict.fromkeys(range(9999))] %}"),
    "many strings": "{% set ns = namespace(x=1) %}" + loops(1, "{% set ns.x = [ns.x, 'a' * 999999] %}"),
    "urlencode": grown("'&'", "(ns.x ~ ns.x) | urlencode"),
    "output": loops(2, "{{ 'a' * 9999 }}"),
    "output of a block": "{% set x %}" + loops(2, "{{ 'a' * 9999 }}") + "{% endset %}",
    "truncate": "{{ 'a' * 9999 | truncate(10 ** 10, true, 'a' * 10 ** 10) }}",
}
COMPILING = {
    "break outside of a loop": "a\n{% break %}",
    "continue in a macro in a loop": "{% for i in [1] %}\n{% macro m() %}{% continue %}{% endmacro %}{% endfor %}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "deep not": "{{ " + "not " * 20_000 + "1 }}",
    "deep minus": "{{ " + "-" * 5000 + "1 }}",
    "long sum": "{{ 1" + " + 1" * 20_000 + " }}",
    "long concatenation": "{{ 1" + " ~ 1" * 40_000 + " }}",
    "long comparison": "{{ 1" + " < 1" * 40_000 + " }}",
    "long attribute": "{{ a" + ".a" * 40_000 + " }}",
    "long filters": "{{ a" + "|e" * 40_000 + " }}",
    "long calls": "{{ a" + "()" * 40_000 + " }}",
    "deep if": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "deep loops": "{% for i in x %}" * 5000 + "{% endfor %}" * 5000,
    "long elif": "{% if 1 %}" + "{% elif 1 %}" * 15_000 + "{% endif %}",
    "many outputs": "{{ a }}" * 28_000,
    "long number": "{{ " + "9" * 100_000 + " }}",
    "long number with underscores": "{{ " + "9_" * 99_000 + "9 }}",
    "long float": "{{ 1" + "0" * 100_000 + ".5e5 }}",
    "long name": "{{ " + "a" * 150_000 + "' }}",
    "long source": "a" * 10_000_000,
    "constant expression": "{{ 'a' * 10 ** 10 if false }}{{ ('a' | center(10 ** 10)) }}",
    "unclosed comment": "{#" * 90_000,
    "unclosed tags": "{%" * 90_000,
    "unclosed strings": "{{ '" * 40_000,
    "unclosed raw": "{% raw %}" * 20_000,
    "many line statements": "{%- if a -%}\n" * 10_000,
    "include": "a\n{% include 'x' %}",
    "extends": "{% extends 'x' %}",
    "import": "{% import 'os' as os %}",
    "from import": "{% from 'os' import path %}",
    "block": "{% block a %}{{ self.a() }}{% endblock %}",
    "autoescape": "{% autoescape true %}{{ '<' * 9999 }}{% endautoescape %}",
    "a lone surrogate": "{{ '\\ud800' | upper | tojson | int | nothing }}",
    "a NUL": "{{ \0 }}",
}
ESCAPING = {
    "classes": "{{ ''.__class__.__mro__ }}",
    "encode": "{{ ('a' * 99).encode() }}",
    "translate": "{{ 'a'.translate({97: 'a' * 10 ** 9}) }}",
    "maketrans": "{{ 'a'.maketrans('a', 'b') }}",
    "bound method as a filter argument": "{{ messages | map('center', 10 ** 10) | list }}",
    "filter by a long name": "{{ messages | map('a' * 99999999) | list }}",
    "macro as text": "{% macro m() %}{% endmacro %}{{ m }}",
    "namespace as text": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    "namespace in a list": "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns.x }}",
    "namespace in a format": "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ '%s' % ns.x }}",
    "set of views": "{{ ({'a': 1}.keys() - []) }}",
    "globals of a function": "{{ raise_exception.__globals__.keys() }}",
    "in a chain": "{{ 1 in [1] in [true] }}",
    "long message": "{{ raise_exception('a' * 9999999) }}",
    "pprint": "{{ messages | pprint }}",
    "urlize": "{{ 'a' | urlize }}",
    "striptags": "{{ 'a' | striptags }}",
    "xmlattr": "{{ {} | xmlattr }}",
}
ALL = {**TIME, **MEMORY, **COMPILING, **ESCAPING}


def outcome(source: str) -> str:
    """The message of Ingot's error, or what else happens."""
    try:
        text = ChatTemplate(source, "chat_template.jinja", {}).render(MESSAGES)
    except IngotError as error:
        return f"{type(error).__name__}: {error}"
    except BaseException as error:  # noqa: BLE001 (what must not happen, such as SystemExit, is reported)
        return f"escaped: {type(error).__name__}: {str(error)[:200]}"
    return f"rendered {len(text)} characters"


def in_a_process(source: str) -> tuple[float, str]:
    """Seconds of processor time, and the outcome; both from a process with limits."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        started = time.process_time()
        message = outcome(source)
        os.write(writer, json.dumps([time.process_time() - started, message]).encode()[:60_000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        content = file.read()
    _, status, usage = os.wait4(child, 0)
    if not content:
        return usage.ru_utime, f"killed by signal {os.WTERMSIG(status)}"
    seconds, message = json.loads(content)
    return seconds, message


if __name__ == "__main__":
    names = sys.argv[1:] or list(ALL)
    results = {name: in_a_process(ALL[name]) for name in names}
    if os.environ.get("SHOW"):
        for name, (seconds, text) in results.items():
            print(f"{seconds:6.2f} {name:40} {text[:230]}")
    else:
        Path("/dev/stdout").write_text(json.dumps(results))
