"""Parameters of `ingot run`, from options and from lines of a file: those of sampling, or of a beam search."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ingot.artifact.json_text import read_limited
from ingot.errors import RequestError, UsageError, shown, shown_path
from ingot.runtime import BeamParams, Constraint, SamplingParams
from ingot.runtime.constraints.constraint import MAX_CHARS
from ingot.runtime.requests.engine_request import GenerationParams

SAMPLING_NAMES = tuple(field.name for field in fields(SamplingParams))
BEAM_NAMES = ("beam_width", "length_penalty")
_MOST_BYTES = 4 * MAX_CHARS
_OF_BOTH = ("max_tokens", "stop_token_ids", "ignore_eos", "constraint")


def generation_params(sampling: SamplingParams, beam_width: Any, length_penalty: Any) -> GenerationParams:
    """The parameters of a beam search if it has a width, else those of sampling; None is a value not given.

    Raises UsageError for parameters of sampling that a beam search does not have, and for invalid values.
    """
    if beam_width is None:
        if length_penalty is not None:
            raise UsageError(
                f"length_penalty is {shown(length_penalty)}, and only a beam search has one; give beam_width too"
            )
        return sampling
    for field in fields(SamplingParams):
        value = getattr(sampling, field.name)
        if field.name not in _OF_BOTH and value != field.default:
            raise UsageError(_not_of_beams(field.name, value, beam_width))
    common = {name: getattr(sampling, name) for name in _OF_BOTH}
    penalty = {} if length_penalty is None else {"length_penalty": length_penalty}
    try:
        return BeamParams(width=beam_width, **common, **penalty)
    except RequestError as error:
        raise UsageError(f"beam search: {error}") from error


def constraint_of(schema: Path | None, regex: str | None, grammar: Path | None) -> Constraint | None:
    """Make the constraint of the option that is given. UsageError for several, and for one that is not valid."""
    given = {"--schema": schema, "--regex": regex, "--grammar": grammar}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} constrain the same text; give one of them")
    try:
        if schema is not None:
            return Constraint.json_schema(_text_of(schema, "--schema"))
        if grammar is not None:
            return Constraint.grammar(_text_of(grammar, "--grammar"))
        return None if regex is None else Constraint.regex(regex)
    except RequestError as error:
        raise UsageError(f"{named[0]}: {error}") from error


def _text_of(file: Path, option: str) -> str:
    try:
        return read_limited(file, _MOST_BYTES).decode("utf-8")
    except OSError as error:
        raise UsageError(f"{option} {shown_path(file)} cannot be read: {error.strerror}; check the path") from error
    except ValueError as error:
        raise UsageError(f"{option} {shown_path(file)} cannot be read as text: {error}; give a UTF-8 file") from error


def with_values(params: GenerationParams, given: Mapping[str, Any]) -> GenerationParams:
    """The parameters with other values for some of them, by name. A `beam_width` of None ends a beam search."""
    beams: dict[str, Any] = dict.fromkeys(BEAM_NAMES)
    if isinstance(params, BeamParams) and given.get("beam_width", params.width) is not None:
        beams = {"beam_width": params.width, "length_penalty": params.length_penalty}
    sampling = params.sampling if isinstance(params, BeamParams) else params
    sampling = replace(sampling, **{name: value for name, value in given.items() if name in SAMPLING_NAMES})
    return generation_params(sampling, **beams | {name: given[name] for name in BEAM_NAMES if name in given})


def _not_of_beams(name: str, value: object, beam_width: object) -> str:
    """Return why a parameter of sampling cannot be combined with a beam search."""
    why = "a beam search does not have it"
    if name in ("n", "best_of"):
        why = "a beam search returns its best sequence"
    elif name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        why = "a beam search samples nothing"
    elif name == "stop":
        why = "a beam search ends at tokens alone"
    return f"{name} is {shown(value)} and beam_width {shown(beam_width)}, but {why}; leave out one of them"
