"""An adapter that runs whole requests, without a model; its calls are written to the file of the option log."""

from pathlib import Path

from benchmarks.adapters.base import Setup, Timing, Tokens, run

from tests.benchmarks.counting_adapter import prepare


class CountingRequests:
    """Prompts take seven seconds, a step one."""

    def __init__(self, setup: Setup, model: Path) -> None:
        self._log = Path(str(setup.options["log"]))
        self._record("load", model.name)

    def prefill(self, prompts: Tokens) -> Timing:
        self._record("prefill", *prompts.shape)
        return Timing(7.0, None, 1)

    def decode(self, prompts: Tokens, steps: int) -> Timing:
        self._record("decode", *prompts.shape, steps)
        return Timing(float(steps), None, steps)

    def _record(self, *facts: object) -> None:
        with self._log.open("a") as file:
            print(*facts, file=file)


if __name__ == "__main__":
    run(prepare, CountingRequests)
