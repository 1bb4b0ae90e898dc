"""An adapter without a model, whose every call writes a line to a file; run as a process by test_peers.

Options: log, a file; fails, the name of the call that raises; hangs, that of the call that does not end.
"""

import time
from pathlib import Path

from benchmarks.adapters.base import PreparedModel, Setup, Tokens, run


class Counting:
    """Records its calls."""

    def __init__(self, setup: Setup, model: Path) -> None:
        self._options = setup.options
        self._record("load", model.name, setup.threads)

    def start(self, prompts: Tokens, max_tokens: int) -> None:
        self._record("start", *prompts.shape, max_tokens)

    def step(self) -> None:
        self._record("step")

    def _record(self, call: str, *facts: object) -> None:
        print("a library prints")
        if self._options.get("fails") == call:
            raise RuntimeError(f"{call} is impossible")
        if self._options.get("hangs") == call:
            time.sleep(600)
        with Path(str(self._options["log"])).open("a") as file:
            print(call, *facts, file=file)


def prepare(setup: Setup) -> PreparedModel:
    """A model that nothing reads."""
    if setup.options.get("fails") == "prepare":
        raise ValueError("the checkpoint is odd")
    return PreparedModel(setup.work_folder / "converted", {"counting": "1"}, 10, 2, "counts")


if __name__ == "__main__":
    run(prepare, Counting)
