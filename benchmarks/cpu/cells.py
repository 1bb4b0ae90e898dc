"""The cells of the comparison of CPU engines: what is measured, in which order. No clock, no process.

A cell is one shape, thread count and kind of work; all engines take turns in it: those of PEERS, in the part "recipes"
those of RECIPE_ENGINES. To add a cell, add a row to WORK.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from benchmarks.peers import Sequences

Part = Literal["decode", "prefill", "context", "neighbours", "load", "recipes"]
PARTS: tuple[Part, ...] = get_args(Part)
LOAD_SHAPE = "tinyllama-1.1b"
LONG_PROMPT = 4096
# tokens that a sequence may decode in all rounds of its cells; times the batch, it sizes the engines' KV caches
_ROOM = {1: 512, 8: 256, 64: 128}


@dataclass(frozen=True)
class Work:
    """Sequences of one length that decode `steps` tokens in a round; 0: each round computes the prompts.

    neighbours   processes that spin on a core meanwhile
    budget       seconds after which no round begins
    """

    part: Part
    batch: int
    prompt_tokens: int
    steps: int
    budget: float
    neighbours: int = 0

    @property
    def sequences(self) -> Sequences:
        """Number and lengths of the sequences that the engines need room for."""
        return Sequences(self.batch, self.prompt_tokens, self.prompt_tokens + _ROOM[self.batch])

    @property
    def round_tokens(self) -> int:
        """Tokens that a whole round counts."""
        return self.batch * (self.steps or self.prompt_tokens)

    def __str__(self) -> str:
        if not self.steps:
            return f"prefill of {self.prompt_tokens} tokens"
        plural = "s" * (self.neighbours > 1)
        others = f", {self.neighbours} busy neighbour{plural}" if self.neighbours else ""
        return f"decode, batch {self.batch}, context {self.prompt_tokens}{others}"


# In the order in which they run: the decode at a long context follows the prefill that computes it.
WORK: tuple[Work, ...] = (
    Work("decode", 1, 64, steps=16, budget=25),
    Work("neighbours", 1, 64, steps=8, budget=25, neighbours=1),
    Work("neighbours", 1, 64, steps=8, budget=25, neighbours=2),
    Work("decode", 8, 16, steps=8, budget=30),
    Work("decode", 64, 16, steps=4, budget=45),
    Work("prefill", 1, 512, steps=0, budget=60),
    Work("prefill", 1, LONG_PROMPT, steps=0, budget=100),
    Work("context", 1, LONG_PROMPT, steps=16, budget=30),
    Work("recipes", 1, 64, steps=16, budget=25),
    Work("recipes", 8, 16, steps=8, budget=25),
    Work("recipes", 1, 512, steps=0, budget=40),
)


@dataclass(frozen=True)
class Cell:
    """One cell; `key` identifies it in the results."""

    shape: str
    threads: int
    work: Work

    @property
    def key(self) -> dict[str, object]:
        """Of its record."""
        work = asdict(self.work)
        del work["budget"]
        return {"shape": self.shape, "threads": self.threads, **work}

    @property
    def is_long(self) -> bool:
        """True for cells that compute or continue a long prompt, in which most of the time of a run goes."""
        return self.work.prompt_tokens >= LONG_PROMPT

    def __str__(self) -> str:
        return f"{self.shape}, {self.threads} threads, {self.work}"


def cells_of(shape: str, threads: int, parts: Iterable[Part], quick: bool = False) -> list[Cell]:
    """Cells that the same processes measure, in order; quick leaves long prompts out."""
    wanted = set(parts)
    cells = [Cell(shape, threads, work) for work in WORK if work.part in wanted]
    return [cell for cell in cells if not (quick and cell.is_long)]


def pool_tokens(cells: Sequence[Cell]) -> int:
    """Most tokens that a cell's sequences hold together."""
    return max(cell.work.batch * cell.work.sequences.max_tokens for cell in cells)
