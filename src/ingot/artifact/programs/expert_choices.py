"""How often each expert is chosen on a text, measured at build, and the placement of experts that follows from it.

program/experts.json   ExpertChoices
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from statistics import fmean
from typing import Annotated

from pydantic import Field

from ingot.artifact.json_text import read_program
from ingot.artifact.programs.cpu_program import OPERATIONS_FILE, CpuProgram, Experts
from ingot.artifact.programs.cpu_program_checks import read_whole_program
from ingot.artifact.programs.operation_row import Frozen
from ingot.artifact.reader import Artifact
from ingot.errors import ArtifactError, shown
from ingot.sizes import ceil_div

EXPERTS_FILE = "program/experts.json"
WINDOWS = (1, 2, 4, 8, 16, 32)
"""Numbers of tokens whose distinct experts are counted."""
MOST_REACHED = 1 - 1e-9
"""The largest share of experts that rows reach in a plan: all of them, less what keeps logarithms finite."""
_MAX_BYTES = 2**26
_MOST_TOKENS = 10**12

Count = Annotated[int, Field(ge=0, le=_MOST_TOKENS)]
Mean = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Reach = tuple[tuple[float, float], ...]
"""Shares of a whole, each below 1, that ascending counts reach: of a layer's experts those that rows reach.

The logarithm of what is not reached is linear between counts, and goes on after the last. So one pair, ((1, share),),
is a share that each unit reaches at random: 1 - (1 - share) ** count.
"""


def reached(reach: Reach, count: float) -> float:
    """Return the share that a count reaches."""
    origin, missed, slope = 0.0, 0.0, 0.0
    for end, share in reach:
        after = math.log1p(-share)
        slope = (after - missed) / (end - origin)
        if count <= end:
            break
        origin, missed = end, after
    return -math.expm1(missed + slope * (count - origin))


def even_reach(experts: int, chosen: int) -> Reach:
    """Return what rows reach if all experts are equally likely."""
    return ((1, min(chosen / experts, MOST_REACHED)),)


class LayerChoices(Frozen):
    """Choices of one layer's router.

    chosen        experts that compute a token
    counts        [experts] tokens that each expert computed
    consecutive   mean number of distinct experts that 1, 2, 4 ... (WINDOWS) consecutive tokens of a sequence reach, as
                  far as sequences are that long
    concurrent    likewise tokens of as many sequences at one position, as in a step that decodes them, as far as there
                  are that many sequences
    """

    chosen: int = Field(ge=1)
    counts: tuple[Count, ...] = Field(min_length=1)
    consecutive: tuple[Mean, ...] = Field(min_length=1, max_length=len(WINDOWS))
    concurrent: tuple[Mean, ...] = Field(min_length=1, max_length=len(WINDOWS))

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of each expert in all choices; the sum is 1."""
        total = sum(self.counts)
        return tuple(count / total for count in self.counts)

    @property
    def reach(self) -> Reach:
        """Share of the layer's experts that rows of a step reach, each of a sequence; more rows reach no fewer."""
        shares = accumulate((mean / len(self.counts) for mean in self.concurrent), max)
        return tuple((rows, min(share, MOST_REACHED)) for rows, share in zip(WINDOWS, shares, strict=False))

    @property
    def busiest_quarter(self) -> float:
        """Share of the most chosen quarter of the experts, rounded up to whole ones, in all choices."""
        return sum(sorted(self.shares, reverse=True)[: ceil_div(len(self.counts), 4)])


class ExpertChoices(Frozen):
    """program/experts.json: choices by the name of the node that combines a layer's experts.

    text, sha256   name and digest of the calibration text
    tokens         tokens that each router chose for
    """

    text: str = Field(max_length=4096)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    tokens: int = Field(ge=1, le=_MOST_TOKENS)
    layers: dict[str, LayerChoices] = Field(min_length=1)

    @property
    def reach(self) -> Reach:
        """Mean over the layers of the share of experts that rows reach."""
        by_rows = zip(*(layer.reach for layer in self.layers.values()), strict=False)
        return tuple((pairs[0][0], fmean(share for _, share in pairs)) for pairs in by_rows)

    def __str__(self) -> str:
        """The text that they were counted on."""
        return f"{self.tokens:,} tokens of {self.text}"


def read_expert_choices(artifact: Artifact, program: CpuProgram | None = None) -> ExpertChoices | None:
    """Read program/experts.json and check it against the program; None where the artifact has no such file.

    program   that of the artifact, where the caller has read it

    ArtifactError with the file and its first problem.
    """
    if not artifact.has(EXPERTS_FILE):
        return None
    file = artifact.file(EXPERTS_FILE)
    choices = read_program(file, ExpertChoices, _MAX_BYTES)
    problem = next(_problems(choices), None)
    if problem is None and artifact.has(OPERATIONS_FILE):
        problem = next(_problems_with(choices, program or read_whole_program(artifact)), None)
    if problem is not None:
        raise ArtifactError(f"{file}: {problem}; it is damaged, or of another artifact: build the artifact again")
    return choices


def read_expert_shares(artifact: Artifact, program: CpuProgram | None = None) -> dict[str, tuple[float, ...]]:
    """Return the share of the choices of each expert, by the node of each Experts operation; each layer's sum is 1.

    An artifact whose experts were not measured has none. ArtifactError for a damaged file.
    """
    choices = read_expert_choices(artifact, program)
    return {} if choices is None else {node: layer.shares for node, layer in choices.layers.items()}


def _problems(choices: ExpertChoices) -> Iterator[str]:
    for node, layer in choices.layers.items():
        name, experts = shown(node), len(layer.counts)
        if layer.chosen > experts:
            yield f"the layer {name} chooses {layer.chosen} of {experts} experts"
        if sum(layer.counts) != choices.tokens * layer.chosen:
            yield (
                f"the counts of the layer {name} add up to {sum(layer.counts)}; they must be {layer.chosen} for each of"
                f" {choices.tokens} tokens"
            )
        if max(layer.counts) > choices.tokens:
            yield f"an expert of the layer {name} has {max(layer.counts)} of {choices.tokens} tokens"
        kinds = (zip(WINDOWS, means, strict=False) for means in (layer.consecutive, layer.concurrent))
        for rows, mean in chain(*kinds):
            most = min(experts, rows * layer.chosen)
            if not layer.chosen <= mean <= most:
                yield f"{rows} tokens of the layer {name} reach {mean} experts; they must be {layer.chosen} to {most}"


def _problems_with(choices: ExpertChoices, program: CpuProgram) -> Iterator[str]:
    """Layers that the program lacks, or has with other experts, and layers of the program that the file lacks."""
    layers: Mapping[str, tuple[int, int]] = {
        one.node: (one.count, one.chosen) for one in program.operations if isinstance(one, Experts)
    }
    unequal = choices.layers.keys() ^ layers.keys()
    if unequal:
        yield (
            f"it has {len(choices.layers)} layers with experts, {OPERATIONS_FILE} has {len(layers)}, and"
            f" {shown(min(unequal))} is in one of them alone"
        )
        return
    for node, (count, chosen) in layers.items():
        own = choices.layers[node]
        if (len(own.counts), own.chosen) != (count, chosen):
            yield (
                f"the layer {shown(node)} chooses {own.chosen} of {len(own.counts)} experts, in {OPERATIONS_FILE}"
                f" {chosen} of {count}"
            )


def balanced_owners(shares: Sequence[float], count: int) -> list[int]:
    """Return the owner, 0 to count - 1, of each expert: equal memory, and sums of shares that differ little.

    Each owner has len(shares) // count experts or one more. Largest share first (longest processing time), an expert
    goes to the owner with the smallest sum that has room; equal shares and sums in the order of their numbers.

    The largest sum is at most the mean of the sums plus the larger of that mean and the largest share, and so at most
    twice the smallest possible; docs/log.md has the proof.

    Raises ValueError for a count below 1, and for a share that is negative or not a number.
    """
    if count < 1:
        raise ValueError(f"count is {count}; experts need one owner or more")
    if not all(share >= 0 for share in shares):
        raise ValueError("shares of experts must be numbers from 0")
    least, larger = divmod(len(shares), count)
    owners, sums, sizes = [0] * len(shares), [0.0] * count, [0] * count
    for expert in sorted(range(len(shares)), key=lambda one: -shares[one]):
        room = least + (sum(size > least for size in sizes) < larger)
        owner = min((one for one in range(count) if sizes[one] < room), key=sums.__getitem__)
        owners[expert] = owner
        sums[owner] += shares[expert]
        sizes[owner] += 1
    return owners
