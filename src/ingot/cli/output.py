"""Settings of this process's output. console.py, which loads rich, is apart: help and completion do without."""

from dataclasses import dataclass
from typing import Literal

ProgressKind = Literal["auto", "plain", "bar", "none"]


@dataclass
class Output:
    """Set before a command runs.

    quiet         neither progress nor notes and warnings
    details       each layer's error as it is quantized, too
    printed_json  the command has printed its JSON, which an error must not follow with another object
    """

    quiet: bool = False
    progress: ProgressKind = "auto"
    details: bool = False
    printed_json: bool = False


output = Output()


def set_output(quiet: bool = False, progress: ProgressKind = "auto") -> None:
    """Begin a command."""
    output.quiet, output.progress, output.details, output.printed_json = quiet, progress, False, False
