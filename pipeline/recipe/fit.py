"""Compares a recipe with the model that it builds: lengths with the context, blocks with the rows of the weights.

Both are known from the checkpoint's config.json and headers, before any weight is read. A length that the recipe leaves
out becomes shorter where the default does not fit; one that it sets is refused.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
from pydantic import BaseModel

from ingot.passes.numerics.scheme import Scheme
from ingot.passes.quantization.bit_assignment import Count, stored_bytes
from ingot.passes.quantization.quantize_weights import QuantizeWeights
from ingot.pipeline.recipe.load import raise_problems
from ingot.pipeline.recipe.schema import Recipe
from ingot.pipeline.recipe.sections import EngineSizes
from ingot.pipeline.targets.table import NATIVE
from ingot.progress import note

_BLOCKS = (16, 32, 64, 128, 256)
_WASTE = 1.25  # stored columns over columns: above this there is a warning

_log = logging.getLogger("ingot.pipeline")


@dataclass(frozen=True)
class _Lengths:
    """Keys of one section that share the context: key -> its least value."""

    section: str
    least: Mapping[str, int]
    starts_with_bos: bool = False


_LENGTHS = (
    _Lengths("evaluation", {"window_tokens": 1}, starts_with_bos=True),
    _Lengths("calibration", {"sequence_tokens": 2}),
    _Lengths("latency", {"prompt_tokens": 1, "output_tokens": 2}),
    _Lengths("memory", {"prompt_tokens": 1, "output_tokens": 1}),
)


def fit_to_model(recipe: Recipe, context_tokens: int, bos_tokens: int = 0) -> Recipe:
    """Return the recipe with default lengths that the model's context holds, and note which were shortened.

    bos_tokens    tokens that the tokenizer puts before a text

    Raises RecipeError for every length that the recipe sets and the context does not hold, at its key.
    """
    problems = []
    if recipe.engine.block_tokens > max(context_tokens, EngineSizes().block_tokens):
        what = f"a block of {recipe.engine.block_tokens} tokens is longer than the model's context, {context_tokens}"
        problems.append(recipe.problem("engine.block_tokens", f"engine.block_tokens: {what}; set it to that or less"))
    for lengths in _LENGTHS:
        added = bos_tokens if lengths.starts_with_bos else 0
        recipe, refused = _fit(recipe, lengths, context_tokens, added)
        if refused:
            problems.append(recipe.problem(refused[0], refused[1]))
    raise_problems(problems)
    return recipe


def _fit(recipe: Recipe, lengths: _Lengths, context_tokens: int, added: int) -> tuple[Recipe, tuple[str, str] | None]:
    """The recipe with the section's defaults shortened; or, unchanged, the key to refuse and why."""
    section = getattr(recipe, lengths.section)
    if section is None or (lengths.section == "calibration" and not _calibrates(recipe)):
        return recipe, None
    values = {key: getattr(section, key) for key in lengths.least}
    room = context_tokens - added - sum(values.values())
    if room >= 0:
        return recipe, None
    given = {key: value for key, value in values.items() if recipe.sets(f"{lengths.section}.{key}")}
    shortened = _shortened(values, given, lengths.least, context_tokens - added)
    if shortened is None:
        key = f"{lengths.section}.{next(iter(given), next(iter(values)))}"
        return recipe, (key, _refusal(lengths, values, context_tokens, added))
    for key, value in shortened.items():
        held = f"the model's context holds {context_tokens} tokens{_after(added)}"
        note(f"{lengths.section}.{key} is {value} instead of the default {values[key]}: {held}")
    is_model = isinstance(section, BaseModel)
    changed = section.model_copy(update=shortened) if is_model else replace(section, **shortened)
    return recipe.model_copy(update={lengths.section: changed}), None


def _calibrates(recipe: Recipe) -> bool:
    return any(made.needs_calibration for made in recipe.make_passes())


def _shortened(
    values: Mapping[str, int], given: Mapping[str, int], least: Mapping[str, int], context_tokens: int
) -> dict[str, int] | None:
    """The defaults scaled to what the given lengths leave of the context; None where that is too little."""
    defaults = {key: value for key, value in values.items() if key not in given}
    room = context_tokens - sum(given.values())
    if not defaults or room < sum(least[key] for key in defaults):
        return None
    scaled = {key: max(least[key], room * value // sum(defaults.values())) for key, value in defaults.items()}
    first = next(iter(scaled))
    scaled[first] -= max(0, sum(scaled.values()) - room)
    return scaled


def _refusal(lengths: _Lengths, values: Mapping[str, int], context_tokens: int, added: int) -> str:
    keys = " + ".join(f"{lengths.section}.{key}" for key in values)
    fitting = context_tokens - added
    return (
        f"{keys} is {sum(values.values())}, and the model's context holds {context_tokens} tokens{_after(added)}: set "
        f"{'them' if len(values) > 1 else 'it'} to {fitting} or less{' together' if len(values) > 1 else ''}"
    )


def _after(added: int) -> str:
    return f", {added} of them the tokenizer's BOS" if added else ""


def warn_of_padding(recipe: Recipe, model: ir.Model) -> None:
    """Warn of weights whose rows do not fill their blocks, with the bits that they take and a better block size.

    The model is the imported one, before any pass. Passes that choose blocks themselves weigh their size, and need no
    warning.
    """
    is_native = recipe.target == NATIVE.name and recipe.cpu.engine != "onnxruntime"
    for made in recipe.make_passes():
        if isinstance(made, QuantizeWeights):
            padded = [
                _Padded(sites[0].node.name or "", *_shape(weight), scheme, "native" if is_native else "onnxruntime")
                for (weight, scheme), sites in made.plan(model).items()
                if scheme.block_size and _stored_columns(_shape(weight)[1], scheme) > _WASTE * _shape(weight)[1]
            ]
            if padded:
                _log.warning("%s", _padding_message(made.name, padded))


@dataclass(frozen=True)
class _Padded:
    name: str
    rows: int
    columns: int
    scheme: Scheme
    count: Count

    def stored(self, block_size: int) -> int:
        """Bytes of the weight in blocks of this size."""
        return stored_bytes(self.rows, self.columns, replace(self.scheme, block_size=block_size), self.count)


def _padding_message(name: str, padded: Sequence[_Padded]) -> str:
    worst = min(padded, key=lambda weight: weight.columns)
    best = min(_BLOCKS, key=lambda block: (worst.stored(block), -block))
    others = f" (and of {len(padded) - 1} more weights)" if len(padded) > 1 else ""
    return (
        f"{name}: the rows of {worst.name!r}{others} have {worst.columns} columns, which do not fill blocks of "
        f"{worst.scheme.block_size}: padded, they take {_bits(padded):.2f} bits a weight, in blocks of {best} "
        f"{_bits(padded, best):.2f}; set block_size: {best}, or overrides for these weights"
    )


def _bits(padded: Sequence[_Padded], block_size: int | None = None) -> float:
    """Bits per weight in blocks of this size; None: in their own."""
    stored = sum(weight.stored(block_size or weight.scheme.block_size) for weight in padded)
    return 8 * stored / sum(weight.rows * weight.columns for weight in padded)


def _stored_columns(columns: int, scheme: Scheme) -> int:
    return scheme.num_blocks(columns) * scheme.block_size


def _shape(weight: ir.Value) -> tuple[int, int]:
    assert weight.const_value is not None
    rows, columns = weight.const_value.shape.numpy()
    return int(rows), int(columns)
