"""Shell completion of recipes, passes, artifacts, checkpoints, formats and the keys of --set.

Names come from folders and from source files that are read but not imported: completion has to answer at a key press,
and works on an install without the compiler's packages.
"""

import ast
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from ingot.cli.sources import Kind, kind_of, shipped_recipes

_PACKAGE = Path(__file__).parents[1]
_ENGINE_OPTIONS = ("artifact/serving", "runtime/scheduling_policy", "runtime/options", "runtime/speculation_options")
_RECIPE_OPTIONS = ("pipeline/recipe/schema", "pipeline/recipe/sections", "artifact/serving", "validation/options")
# Sections of a recipe that are made from a class with another name.
_MADE_FROM = {"ServingOptions": "ArtifactOptions", "LatencySection": "LatencyLoad", "MemorySection": "MemoryOptions"}
# Further entries of a folder are left out.
_MOST_ENTRIES = 2000

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def names(allowed: Iterable[str]) -> Complete:
    """Complete one of a few names."""
    return lambda ctx, param, incomplete: _starting(allowed, incomplete)


def recipes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a shipped recipe, or a YAML file."""
    return _starting(shipped_recipes(), incomplete) + _paths(incomplete, ("recipe",))


def artifacts(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the folder of an artifact; without a beginning also those in ./artifacts."""
    found = _paths(incomplete, ("artifact",))
    return found if incomplete else _paths("artifacts/", ("artifact",)) + found


def checkpoints(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a checkpoint's folder or a GGUF file."""
    return _paths(incomplete, ("checkpoint",))


def sources(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete an artifact or a recipe."""
    return _starting(shipped_recipes(), incomplete) + _paths(incomplete, ("artifact", "recipe"))


def passes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a pass."""
    return _starting(_pass_names(), incomplete)


def passes_or_all(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a pass, or `all`."""
    return _starting(["all", *_pass_names()], incomplete)


def overrides(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the key of --set, and after the = a path."""
    return _settings(_recipe_keys(), incomplete)


def engine_settings(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the key of `ingot run --set`, and after the = a path."""
    classes = _classes(*(f"{module}.py" for module in _ENGINE_OPTIONS))
    keys = [*_declared(classes, "EngineOptions"), *_declared(classes, "SpeculationOptions")]
    return _settings(keys, incomplete)


def drafters(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a drafter or the folder of a draft artifact, the last of those that are joined by +."""
    before, plus, last = incomplete.rpartition("+")
    named = [CompletionItem(name, help=text) for name, text in _drafters().items() if name.startswith(last)]
    found = [*named, *(_paths(last, ("artifact",)) if last else _paths("artifacts/", ("artifact",)))]
    return [CompletionItem(f"{before}{plus}{item.value}", help=item.help) for item in found]


def _settings(keys: Iterable[tuple[str, str]], incomplete: str) -> list[CompletionItem]:
    key, separator, value = incomplete.partition("=")
    if separator:
        return [CompletionItem(f"{key}={item.value}") for item in _paths(value, None)]
    return [CompletionItem(f"{name}=", help=text or None) for name, text in keys if name.startswith(incomplete)]


def _starting(allowed: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in allowed if name.startswith(incomplete)]


def _paths(incomplete: str, kinds: tuple[Kind, ...] | None) -> list[CompletionItem]:
    """Entries that begin with `incomplete` and are of these kinds (None: any), and folders that may hold some."""
    folder, _, beginning = incomplete.rpartition("/")
    place = Path(f"{folder}/" if "/" in incomplete else ".")
    try:
        entries = sorted(place.expanduser().iterdir())[:_MOST_ENTRIES]
    except (OSError, ValueError, RuntimeError):
        return []
    found = []
    for entry in entries:
        if not entry.name.startswith(beginning) or (entry.name.startswith(".") and not beginning):
            continue
        kind = kind_of(str(entry))
        text = incomplete[: len(incomplete) - len(beginning)] + entry.name
        if kinds is None or kind in kinds:
            found.append(CompletionItem(text + ("/" if kinds is None and entry.is_dir() else "")))
        elif kind == "folder":
            found.append(CompletionItem(f"{text}/"))
    return found


def _table(file: str, name: str) -> dict[str, str]:
    """The literal mapping of this name in a module; empty without one."""
    for node in _parsed(file).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            return dict(ast.literal_eval(node.value)) if node.value else {}
    return {}


def _drafters() -> dict[str, str]:
    return _table("runtime/speculation_options.py", "DRAFTERS")


def _pass_names() -> list[str]:
    """The names in the registry's table, and those of other distributions' entry points."""
    table = _table("passes/registry.py", "PASSES")
    from importlib.metadata import entry_points  # takes as long to import as everything else that help needs

    return sorted({*table, *(point.name for point in entry_points(group="ingot.passes"))})


def _recipe_keys() -> Iterator[tuple[str, str]]:
    """Every key that --set takes, with its description; options of passes and limits of gates by their names."""
    classes = _classes(*(f"{module}.py" for module in _RECIPE_OPTIONS))
    classes |= {section: classes[declaring] for section, declaring in _MADE_FROM.items()}
    for key, description in _keys(classes, "Recipe", ""):
        if key == "passes":
            yield key, description
            yield from ((f"passes.{name}.", "option of this pass") for name in _pass_names())
        else:
            yield key, description


def _classes(*files: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for file in files for node in _parsed(file).body if isinstance(node, ast.ClassDef)}


def _keys(classes: dict[str, ast.ClassDef], name: str, prefix: str) -> Iterator[tuple[str, str]]:
    """The annotated fields of a class and, below a field whose type is another such class, the fields of that."""
    for node in classes[name].body if name in classes else ():
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or node.target.id[0] == "_":
            continue
        key, description = f"{prefix}{node.target.id}", _description(node)
        if not description:
            continue
        yield key, description
        used = [part.id for part in ast.walk(node.annotation) if isinstance(part, ast.Name)]
        section = next((one for one in used if one in classes), None)
        if section is not None and "Mapping" not in used and "tuple" not in used:
            yield from _keys(classes, section, f"{key}.")
        elif section is not None and "Mapping" in used and key == "gates":
            for metric in _metrics():
                yield from _keys(classes, section, f"{key}.{metric}.")


def _declared(classes: dict[str, ast.ClassDef], name: str) -> Iterator[tuple[str, str]]:
    """The options of a class and of those that it extends, but for options with a flag of their own."""
    for base in classes[name].bases:
        yield from _declared(classes, ast.unparse(base))
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not _calls(node, "Flag"):
            yield node.target.id, _description(node)


def _description(node: ast.AnnAssign) -> str:
    """The description of a field: Field(..., description="..."), or Doc("...") in its annotation."""
    words = [word for call in _calls(node, "Field") for word in call.keywords]
    texts = [word.value for word in words if word.arg == "description"] or [doc.args[0] for doc in _calls(node, "Doc")]
    return str(texts[0].value) if texts and isinstance(texts[0], ast.Constant) else ""


def _calls(node: ast.AST, function: str) -> list[ast.Call]:
    calls = (part for part in ast.walk(node) if isinstance(part, ast.Call))
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == function]


def _metrics() -> list[str]:
    """First arguments of the rows of the table of metrics."""
    rows = (call for call in _calls(_parsed("artifact/metrics.py"), "MetricFacts") if call.args)
    return [str(row.args[0].value) for row in rows if isinstance(row.args[0], ast.Constant)]


def _parsed(file: str) -> ast.Module:
    return ast.parse((_PACKAGE / file).read_text(encoding="utf-8"))
