"""Details and notes of passes that change weights: the error of a layer's outputs, and what a pass gained in all."""

from collections.abc import Mapping

from ingot.progress import detail, note


def report_error(name: str, layer: str, nearest: float, after: float) -> None:
    """Report a rounded layer: the error of its outputs, rounded to the nearest and as the pass rounded it."""
    detail(name, f"{layer} {nearest:.2%} -> {after:.2%}")


def report_kept(name: str, layer: str, kept: int, of: int, error: float) -> None:
    """Report a pruned layer: what the pass kept of it, and the error of its outputs."""
    detail(name, f"{layer} keeps {kept} of {of}, {error:.2%}")


def note_errors(name: str, errors: Mapping[str, tuple[float, float]]) -> None:
    """Note at the end of a pass what it gained, from the errors (nearest, after) by layer."""
    if not errors:
        return
    nearest, after = (sum(pair[at] for pair in errors.values()) / len(errors) for at in (0, 1))
    worst = max(errors, key=lambda layer: errors[layer][1])
    note(
        f"{name}: error of the outputs of {len(errors)} layers on the calibration data {after:.2%} on average, "
        f"{nearest:.2%} when rounded to the nearest; the largest {errors[worst][1]:.2%}, {worst}"
    )
