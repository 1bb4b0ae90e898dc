"""Sizes: rounding up, and byte counts as text."""


def ceil_div(count: int, size: int) -> int:
    """Return how many groups of `size` hold `count` items, the last one possibly partial."""
    return -(-count // size)


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple that is not below the size."""
    return ceil_div(size, multiple) * multiple


def next_power_of_two(number: int, least: int = 1) -> int:
    """Return the smallest power of two that is not below either argument."""
    return max(least, 1 << (number - 1).bit_length())


def format_bytes(count: float) -> str:
    """Format a byte count in powers of 1000, as disks and networks count: 11.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
