"""docs/options.md lists every declared option; `python -m tests.test_option_docs` writes it."""

from collections.abc import Iterable
from dataclasses import MISSING
from typing import get_args

from ingot.options import MOST_BYTES, Option, options_of
from ingot.runtime import EngineOptions, RequestOptions, SamplingParams, SpeculationOptions
from ingot.runtime.server.options import ServerOptions
from tests.data_paths import ROOT

DOC = ROOT / "docs" / "options.md"


def rows(options: Iterable[Option]) -> str:
    """A table with a row for each option."""
    head = "| option | type | default | meaning |\n|---|---|---|---|"
    lines = (f"| {name(option)} | {kind(option)} | {default(option)} | {option.doc.text} |" for option in options)
    return "\n".join([head, *lines])


def name(option: Option) -> str:
    """The name, and the flag where it has another one."""
    return f"`{option.name}`{f' (`{option.flag.name}`)' if option.flag.name else ''}"


def kind(option: Option) -> str:
    """The type in a word or two, with the range of a number."""
    if option.choices:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    if option.range is None:
        return {bool: "bool", int: "int"}.get(option.single, "")
    bounds = str(option.range).replace(str(1 << 40), "2^40").replace(str(MOST_BYTES), "2^50")
    name = "bytes" if option.range.bytes else get_args(option.single)[0].__name__
    return name if option.range.words == "a finite number" else f"{name} {bounds}"


def default(option: Option) -> str:
    """The default and what it means."""
    if option.default is MISSING:
        return "required"
    shown = f"`{option.default}`"
    return f"{shown}: {option.doc.none}" if option.doc.none else shown


def document() -> str:
    """The text of docs/options.md."""
    parts = [
        "# Options\n",
        "The options of engines, servers and requests. Each is declared once, in the class that has it (see",
        "[how to add one](../CONTRIBUTING.md#add-an-engine-option)), and this page is made from the declarations.",
        "\n## `Engine.load`\n",
        "`EngineOptions`. `ingot run` and `ingot serve` take them by `--set KEY=VALUE`, where sizes",
        "may have units, but for `adapters` and `speculation`, which have flags. A recipe's section",
        "[`serving`](recipes.md#serving) sets defaults of some for its artifact.\n",
        rows(options_of(EngineOptions).values()),
        "\n## Speculation\n\n`SpeculationOptions`; `--set` takes them, too. See [speculation](speculation.md).\n",
        rows(options_of(SpeculationOptions).values()),
        "\n## `ingot serve`\n\n`ServerOptions`; flags have the same names, with hyphens, but for those in brackets.\n",
        rows(options_of(ServerOptions).values()),
        "\n## Requests\n\n`RequestOptions`, which Python gives as `options=` and a server sets itself.\n",
        rows(options_of(RequestOptions).values()),
        "\n## Sampling\n\n`SamplingParams`; fields of a request over HTTP, and flags of `ingot run`.\n",
        rows(options_of(SamplingParams).values()),
    ]
    return "\n".join(parts) + "\n"


def test_the_page_is_that_of_the_declarations() -> None:
    assert DOC.read_text(encoding="utf-8") == document(), "run python -m tests.test_option_docs"


if __name__ == "__main__":
    DOC.write_text(document(), encoding="utf-8")
