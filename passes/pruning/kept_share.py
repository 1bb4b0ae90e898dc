"""Options that say how much stays: "all", a share above 0 and up to 1, or a number."""

from typing import Literal

from ingot.errors import PassError, UsageError

Kept = Literal["all"] | int | float


def check_kept(owner: str, option: str, value: Kept) -> None:
    """UsageError unless it is "all", a share or a number of 1 or more."""
    is_number = isinstance(value, int) and value >= 1
    if value != "all" and not is_number and not (isinstance(value, float) and 0 < value <= 1):
        raise UsageError(
            f'{owner}: {option} is {value}; allowed: "all", a share above 0 and up to 1.0 (0.75), or a whole number'
        )


def kept_count(option: str, value: Kept, total: int, what: str, multiple: int = 1) -> int:
    """How many of `total` stay; a share is rounded to a multiple, at least one. PassError for more than there are."""
    if value == "all":
        return total
    if isinstance(value, int):
        if value > total:
            raise PassError(f"{option} is {value}, but {what} {total}; set {option} to that or less, or to a share")
        return value
    return min(total, max(multiple, round(float(value) * total / multiple) * multiple))
