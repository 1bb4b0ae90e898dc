"""tokenizer.json: checked, read by the tokenizers package, and tried on a few texts.

The package is written in Rust. It reports some damage as an error and panics on other damage, while it loads or in the
middle of a text (an exception that is not an Exception); a few files make it abort the process or loop. What can be
seen in the file is refused here before the package reads it; what shows on any text is found by encoding samples.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.models import BPE

from ingot.errors import ArtifactError, IngotError, one_of, shown
from ingot.runtime.text.text_bounds import NORMALIZERS, max_growth
from ingot.runtime.text.tokenizer_files import parsed_json, read_text

MAX_GROWTH = 4096
_MAX_ADDED_TOKENS = 64  # by the post-processor, to a text
_CACHED_WORDS = 2000  # 1 MiB a thread, 16 of the longest words; encoding takes an eighth longer than with 10,000
SAMPLES = (
    "",
    "a",
    "Hello, world! 123",
    "  two  spaces \n\n\tand a tab ",
    "é e\u0301 漢字 😀 \ufdfa \u0130 ﬁ Ω",
    "def read_file(path):\n    return path\n" * 8,
    "a\x00\x7f\ufffd\u200d",
    "<s>[INST] <|im_start|> </s>",
)


@contextmanager
def library_errors(failure: Callable[[str], IngotError]) -> Iterator[None]:
    """Turn what the package raises in the block into `failure(reason)`, panics too."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, IngotError):
        raise
    except BaseException as error:  # a panic is not an Exception
        raise failure(shown(str(error), 200).strip("'\"") or type(error).__name__) from error


def read_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, Mapping[str, Any]]:
    """The package's tokenizer, without truncation, padding and dropout, and the file's document.

    Raises ArtifactError, with the part of the file, for what is damaged or makes texts grow without a bound.
    """
    text = read_text(path)
    document = parsed_json(text, path)
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise ArtifactError(f"{path} is not a valid tokenizer: it has no model; copy it again from the checkpoint")

    def damaged(reason: str) -> IngotError:
        return ArtifactError(f"{path} is not a valid tokenizer ({reason}); copy it again from the checkpoint")

    with library_errors(damaged):
        _check(document, path)
        backend = tokenizers.Tokenizer.from_str(text)
        backend.no_truncation()
        backend.no_padding()
        if isinstance(backend.model, BPE):
            backend.model.dropout = None  # it is for training: the tokens of a text would be random
        _bound_cache(backend)
    return backend, document


def _bound_cache(backend: tokenizers.Tokenizer) -> None:
    """Keep the tokens of fewer words: the package keeps them for ever, anew in each thread that encodes."""
    resize = getattr(backend.model, "_resize_cache", None)  # models without words have none
    if resize is not None:
        resize(_CACHED_WORDS)


def _check(document: dict[str, Any], path: Path) -> None:
    """Refuse what the package would not, or not with an error."""
    for name, parts in (
        ("normalizer", "normalizers"),
        ("pre_tokenizer", "pretokenizers"),
        ("post_processor", "processors"),
    ):
        for step in steps(document.get(name), parts):
            problem = _CHECKS.get(str(step.get("type")), _accept)(step)
            if problem:
                raise ArtifactError(f"{path}: the {name} {shown(step['type'])} {problem}; copy the file again")
    for step in steps(document.get("normalizer"), "normalizers"):
        if step.get("type") not in NORMALIZERS:  # the package guesses the type from the other entries
            raise ArtifactError(
                f"{path}: the normalizer {shown(step.get('type'))} is not supported; allowed: {one_of(NORMALIZERS)}; "
                "copy the file again from the checkpoint"
            )
    problem = _merge_problem(document["model"]) or _growth_problem(document) or _added_token_problem(document)
    if problem:
        raise ArtifactError(f"{path}: {problem}; copy the file again from the checkpoint")


def steps(step: object, parts: str) -> Iterator[dict[str, Any]]:
    """The step, or those of a Sequence, which are in its entry `parts`."""
    if isinstance(step, dict) and step.get("type") == "Sequence":
        inner = step.get(parts)
        for part in inner if isinstance(inner, list) else ():
            yield from steps(part, parts)
    elif isinstance(step, dict):
        yield step


def _accept(step: dict[str, Any]) -> str | None:
    return None


def _length_problem(step: dict[str, Any]) -> str | None:
    length = step.get("length")
    return (
        None if length is None or (isinstance(length, int) and length > 0) else f"has length {length!r}, not at least 1"
    )


def _template_problem(step: dict[str, Any]) -> str | None:
    """A text may be in the template once, and its special tokens must be defined."""
    single, defined = step.get("single"), step.get("special_tokens")
    if not isinstance(single, list) or not isinstance(defined, dict):
        return None  # the package reports it
    sequences = [piece for piece in single if isinstance(piece, dict) and "Sequence" in piece]
    if len(sequences) > 1 or len(single) > _MAX_ADDED_TOKENS:
        return f"has {len(single)} parts, {len(sequences)} of them the text; at most {_MAX_ADDED_TOKENS}, and 1"
    for piece in single:
        special = piece.get("SpecialToken") if isinstance(piece, dict) else None
        name = special.get("id") if isinstance(special, dict) else None
        if isinstance(name, str) and name not in defined:
            return f"uses the special token {shown(name)}, which it does not define"
    return None


_CHECKS: Mapping[str, Callable[[dict[str, Any]], str | None]] = {
    "FixedLength": _length_problem,
    "TemplateProcessing": _template_problem,
}


def _merge_problem(model: dict[str, Any]) -> str | None:
    """With a prefix for continued words, the second part of every merge begins with it."""
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not isinstance(prefix, str) or not prefix or not isinstance(merges, list):
        return None
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        second = parts[-1] if isinstance(parts, list) and parts else None
        if not isinstance(second, str) or not second.startswith(prefix):
            return f"the merge {shown(merge)} does not continue with the prefix {shown(prefix)}"
    return None


def _growth_problem(document: dict[str, Any]) -> str | None:
    """A normalizer may make a text longer, within reason."""
    try:
        growth = max_growth(document.get("normalizer"))
    except ValueError as error:
        return f"the normalizer Precompiled has a damaged precompiled_charsmap: {error}"
    if growth <= MAX_GROWTH:
        return None
    kinds = [str(step.get("type")) for step in steps(document.get("normalizer"), "normalizers")]
    names = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return (
        f"the normalizer ({names}) can make a text {growth:,.0f} times longer; at most {MAX_GROWTH:,} times is allowed"
    )


def _added_token_problem(document: dict[str, Any]) -> str | None:
    """An added token whose normalized text is empty matches everywhere, and the package never ends."""
    added = document.get("added_tokens")
    tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    contents = [token.get("content") for token in tokens if token.get("normalized")]
    normalized = [content for content in contents if isinstance(content, str) and content]
    if not normalized or document.get("normalizer") is None:
        return None
    normalizer = _normalizer(document["normalizer"])
    empty = [content for content in normalized if not normalizer.normalize_str(content)]
    return f"the added token {shown(empty[0])} is empty after the normalizer" if empty else None


def _normalizer(entry: object) -> Any:
    """The normalizer alone, with an empty model."""
    empty: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "pre_tokenizer": None,
    }
    model = {"type": "BPE", "vocab": {}, "merges": []}
    document = {**empty, "post_processor": None, "decoder": None, "normalizer": entry, "model": model}
    return tokenizers.Tokenizer.from_str(json.dumps(document)).normalizer


def try_samples(backend: tokenizers.Tokenizer, path: Path) -> list[list[int]]:
    """Tokens of sample texts. ArtifactError for a tokenizer that fails on one, or adds too many tokens to it."""
    found = []
    for sample in SAMPLES:

        def failed(reason: str, sample: str = sample) -> IngotError:
            return ArtifactError(
                f"{path} cannot encode the text {shown(sample, 40)} ({reason}); use a tokenizer that encodes any text"
            )

        with library_errors(failed):
            plain = backend.encode(sample, add_special_tokens=False).ids
            whole = backend.encode(sample).ids
        _require_few_added(sample, plain, whole, path)
        _require_known(backend, whole, path)
        found.append(list(whole))
    return found


def _require_few_added(sample: str, plain: list[int], whole: list[int], path: Path) -> None:
    if len(whole) > len(plain) + _MAX_ADDED_TOKENS:
        raise ArtifactError(
            f"{path}: the post_processor makes {len(whole)} tokens of the {len(plain)} of {shown(sample, 40)}; it may "
            f"add {_MAX_ADDED_TOKENS}: copy the file again from the checkpoint"
        )


def _require_known(backend: tokenizers.Tokenizer, token_ids: list[int], path: Path) -> None:
    unknown = [token_id for token_id in token_ids if backend.id_to_token(token_id) is None]
    if unknown:
        raise ArtifactError(
            f"{path}: the post_processor writes token {unknown[0]}, which the vocabulary does not contain; copy the "
            "file again from the checkpoint"
        )
