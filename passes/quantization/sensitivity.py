"""Loss of the model when one weight alone is quantized: mean KL of its logits on calibration data.

    for found in weight_sensitivities(model, calibration, schemes):       every weight under every scheme
        found.name, found.kl[scheme], found.output_error[scheme]

    divergences_of_each(model, calibration, {"layers.0.mlp.down_proj": make_weight, ...})      weights of the caller

The model does not change. A weight is an initializer with all the nodes that read it: what shares a tensor (a tied
head, a layer that is used twice) is quantized together. The nodes upstream of a weight run once for all of its schemes
(pipeline/calibrate/trials.py).

Runs cost (weights x schemes x the nodes after the weight). `points` bounds them: with 1 or 2, only one or two schemes
of a weight are run, and the others' KL is inferred from the squared error E = sum (x (W - W')^T)^2 of the weight's
outputs over calibration tokens, which costs no run. For small errors KL is a quadratic form in the change of the
logits:

    points: 1    KL = KL_1 * E / E_1
    points: 2    the same below the finer point; KL = KL_1 * (E / E_1)^a above it, with a from both: the coarsest
                 scheme's KL grows more slowly, or faster, than its error

docs/log.md has how well that predicts.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
import onnx_ir as ir

from ingot.errors import PassError, near_or_all
from ingot.passes.calibration import Calibration, CalibrationStage, Trial
from ingot.passes.numerics.arrays import Float32Array, Float64Array
from ingot.passes.numerics.gptq_rounding import DampedGram, gptq_round, output_error
from ingot.passes.numerics.rounding import RoundedWeight, round_weight
from ingot.passes.numerics.scheme import Scheme
from ingot.passes.quantization.gptq import factored_gram
from ingot.passes.quantization.quantize_weights import num_elements
from ingot.passes.weights import Role, WeightSite, float32_values, weight_sites
from ingot.progress import report_progress
from ingot.settings import num_threads

Rounding = Literal["nearest", "gptq"]
Points = Literal["all", 1, 2]

DAMPING = 0.01


@dataclass(frozen=True)
class Sensitivity:
    """The loss that quantizing one weight causes.

    sites           the nodes that read it
    kl              scheme -> mean KL in nats per token when this weight alone is quantized
    output_error    scheme -> sum of squared errors of the weight's outputs over the calibration tokens, damped as in
                    gptq; for an embedding or a weight of several layers, of the weight itself
    measured        schemes whose KL was run, not inferred
    """

    sites: tuple[WeightSite, ...]
    kl: Mapping[Scheme, float]
    output_error: Mapping[Scheme, float]
    measured: frozenset[Scheme]

    @property
    def name(self) -> str:
        """Path of the first reader."""
        return self.sites[0].node.name or ""

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        tensor = self.sites[0].weight.const_value
        assert tensor is not None, "the manager verifies that initializers hold tensors"
        rows, columns = tensor.shape.numpy()
        return int(rows), int(columns)

    def table(self) -> Float64Array:
        """The losses as an array [schemes, 3]: KL, squared error, whether the KL was run."""
        rows = [(self.kl[scheme], self.output_error[scheme], scheme in self.measured) for scheme in self.kl]
        return np.array(rows, np.float64)

    @classmethod
    def from_table(cls, sites: tuple[WeightSite, ...], schemes: Sequence[Scheme], table: Float64Array) -> "Sensitivity":
        """Undo `table` for these schemes."""
        rows = dict(zip(schemes, table.tolist(), strict=True))
        return cls(
            sites,
            {scheme: row[0] for scheme, row in rows.items()},
            {scheme: row[1] for scheme, row in rows.items()},
            frozenset(scheme for scheme, row in rows.items() if row[2]),
        )


def weight_sensitivities(
    model: ir.Model,
    calibration: Calibration,
    schemes: Sequence[Scheme],
    *,
    tokens: int = 4096,
    rounding: Rounding = "nearest",
    points: Points = "all",
    roles: frozenset[Role] = frozenset({"linear"}),
    exclude: Sequence[str] = (),
    name: str = "sensitivity",
) -> list[Sensitivity]:
    """The loss of every scheme for every unquantized weight that has a reader of these roles, in graph order.

    exclude     patterns (fnmatch's) of weights to leave out, by module path or tensor name
    tokens      calibration tokens that a trial is run on, in whole sequences
    rounding    "gptq": round trial weights for the inputs of their layer, as the pass gptq does without refining
    points      schemes to run per weight; the others are inferred, see the module's docstring
    name        label of the progress report

    Raises PassError when a weight's inputs are zero on all data or not finite, and the errors of `stages`.
    """
    waiting = _weights(model, roles, exclude)
    progress, found = _Progress(name, waiting), []
    for stage in calibration.stages(model):
        recorded = stage.recorded()
        made: dict[str, Float64Array] = {}
        for source, sites in _runnable(stage, waiting):
            if recorded is None:
                trials = _WeightTrials(sites, schemes, rounding, _gram(stage, source))
                found.append(trials.sensitivity(stage, tokens, points))
            else:
                found.append(Sensitivity.from_table(sites, schemes, recorded[_key(sites)]))
            made[_key(sites)] = found[-1].table()
            progress.done(sites)
        if recorded is None:
            stage.record(made)
        if not waiting:
            break
    order = {site.node: at for at, site in enumerate(weight_sites(model))}
    return sorted(found, key=lambda each: order[each.sites[0].node])


def divergences_of_each(
    model: ir.Model,
    calibration: Calibration,
    weights: Mapping[str, Callable[[], Float32Array]],
    *,
    tokens: int = 4096,
    name: str = "sensitivity",
) -> dict[str, float]:
    """Mean KL of the model's logits when one weight at a time is replaced by the given one.

    weights     node name (a linear layer, the head, the embedding) -> a function that makes [out, in] float32, called
                on use; its result is not kept. All nodes that read the same tensor get it
    tokens      calibration tokens that each is run on, in whole sequences

    Raises PassError for a node that reads no weight.
    """
    waiting = {key: sites for key, sites in _weights(model).items() if any(_named(sites, weights))}
    _refuse_unknown(weights, model)
    progress = _Progress(name, waiting)
    found: dict[str, float] = {}
    for stage in calibration.stages(model):
        runnable = [sites for _, sites in _runnable(stage, waiting)]
        trials = {node: _trial_of(sites, weights[node]) for sites in runnable for node in _named(sites, weights)}
        if trials:
            found |= zip(trials, stage.divergences(list(trials.values()), tokens), strict=True)
        for sites in runnable:
            progress.done(sites)
        if not waiting:
            break
    return {node: found[node] for node in weights}


def schemes_to_run(schemes: Sequence[Scheme], points: Points) -> list[Scheme]:
    """The schemes to run: all; or, from coarse to fine, the one at a quarter; or the first and the middle one."""
    ordered = sorted(schemes, key=lambda scheme: (scheme.bits, -(scheme.block_size or math.inf)))
    if points == "all" or len(ordered) <= points:
        return list(schemes)
    places = (len(ordered) // 4,) if points == 1 else (0, len(ordered) // 2)
    return [ordered[place] for place in places]


def infer_kl(error: float, measured: Sequence[tuple[float, float]]) -> float:
    """KL at a squared error, inferred from one or two points (squared error, KL): see the module's docstring.

    The exponent is bounded to 1/2 to 2, because noise dominates it when the points are close.
    """
    (large, large_kl), (small, small_kl) = max(measured), min(measured)
    if error <= 0 or small <= 0 or small_kl <= 0:
        return 0.0 if error <= 0 else small_kl
    exponent = 1.0
    if error > small and large > small:
        exponent = min(2.0, max(0.5, math.log(large_kl / small_kl) / math.log(large / small)))
    nearest, nearest_kl = min(measured, key=lambda point: abs(math.log(point[0] / error)))
    return nearest_kl * float((error / nearest) ** exponent)


@dataclass
class _WeightTrials:
    """One weight under all schemes. gram: X^T X of its inputs, where one layer reads it."""

    sites: tuple[WeightSite, ...]
    schemes: Sequence[Scheme]
    rounding: Rounding
    gram: DampedGram | None
    _weight: Float32Array = field(init=False)
    _errors: dict[Scheme, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._weight = float32_values(self.sites[0].operand)

    def sensitivity(self, stage: CalibrationStage, tokens: int, points: Points) -> Sensitivity:
        """Run some schemes, infer the others."""
        run = schemes_to_run(self.schemes, points)
        trials = [_trial_of(self.sites, partial(self._rounded, scheme)) for scheme in run]
        kl = dict(zip(run, stage.divergences(trials, tokens), strict=True))
        for scheme in self.schemes:
            if scheme not in self._errors:
                self._rounded(scheme)
        measured = [(self._errors[scheme], kl[scheme]) for scheme in run]
        kl |= {scheme: infer_kl(self._errors[scheme], measured) for scheme in self.schemes if scheme not in kl}
        return Sensitivity(self.sites, {scheme: kl[scheme] for scheme in self.schemes}, self._errors, frozenset(run))

    def _rounded(self, scheme: Scheme) -> Float32Array:
        """The weight that the layer would compute with; records its error."""
        rounded = _round(self._weight, scheme, self.sites[0])
        if self.rounding == "gptq" and self.gram is not None:
            rounded = gptq_round(self._weight, rounded, self.gram, scheme, refine=0)
        values = rounded.restored(scheme)
        self._errors[scheme] = _squared_error(self._weight - values, self.gram)
        return values


def _round(weight: Float32Array, scheme: Scheme, site: WeightSite) -> RoundedWeight:
    try:
        return round_weight(weight, scheme, num_threads())
    except ValueError as error:
        raise PassError(f"weight {site.weight.name!r} holds {error} values; check the checkpoint") from error


def _squared_error(error: Float32Array, gram: DampedGram | None) -> float:
    return float(np.square(error, dtype=np.float64).sum()) if gram is None else output_error(error, gram.gram)


def _trial_of(sites: Sequence[WeightSite], make: Callable[[], Float32Array]) -> Trial:
    """A trial in which all readers of a weight compute with another one."""
    return dict.fromkeys((site.operand for site in sites), make)


def _weights(
    model: ir.Model, roles: frozenset[Role] | None = None, exclude: Sequence[str] = ()
) -> dict[ir.Value, tuple[WeightSite, ...]]:
    """Weights with all their readers, in graph order; with roles, only those neither quantized nor excluded."""
    found: dict[ir.Value, tuple[WeightSite, ...]] = {}
    for site in weight_sites(model):
        found[site.weight] = (*found.get(site.weight, ()), site)

    def is_selected(sites: tuple[WeightSite, ...]) -> bool:
        if roles is None:
            return True
        has_role = any(site.role in roles for site in sites)
        return has_role and not sites[0].is_quantized and not any(site.matches(exclude) for site in sites)

    return {weight: sites for weight, sites in found.items() if is_selected(sites)}


def assumed_sensitivities(
    model: ir.Model, schemes: Sequence[Scheme], roles: frozenset[Role], exclude: Sequence[str] = ()
) -> list[Sensitivity]:
    """Losses of every weight without data: the squared step between codes, in proportion to the weight's elements."""
    found = []
    for sites in _weights(model, roles, exclude).values():
        weight = Sensitivity(sites, {}, {}, frozenset())
        rows, columns = weight.shape
        kl = {
            scheme: rows * columns * 4.0**-scheme.bits * (1 + scheme.block_columns(columns) / 1024)
            for scheme in schemes
        }
        found.append(replace(weight, kl=kl))
    return found


def _key(sites: Sequence[WeightSite]) -> str:
    """The key under which a stage's result is stored."""
    return sites[0].weight.name or ""


def _named(sites: Sequence[WeightSite], weights: Mapping[str, object]) -> Iterator[str]:
    return (name for site in sites if (name := site.node.name or "") in weights)


def _refuse_unknown(weights: Mapping[str, object], model: ir.Model) -> None:
    allowed = {site.node.name or "" for site in weight_sites(model)}
    for name in weights:
        if name not in allowed:
            raise PassError(f"{name!r} reads no weight{near_or_all(name, allowed, 'nodes that do')}")


def _runnable(
    stage: CalibrationStage, waiting: dict[ir.Value, tuple[WeightSite, ...]]
) -> Iterator[tuple[ir.Value | None, tuple[WeightSite, ...]]]:
    """Take the weights that can be tried at this stage out of `waiting`; yield each with its only reader's input.

    A weight with several readers, or an embedding, is tried at its first stage, without an input: trials reach back to
    the embedding, and ahead to all later layers.
    """
    sources = {node: group.source for group in stage.groups for node in group.linears}
    for weight, sites in list(waiting.items()):
        first = next((site for site in sites if site.role == "embedding" or site.node in sources), None)
        if first is not None:
            yield (sources[first.node] if len(sites) == 1 and first.role != "embedding" else None), waiting.pop(weight)


def _gram(stage: CalibrationStage, source: ir.Value | None) -> DampedGram | None:
    if source is None or stage.too_few(source):
        return None
    return factored_gram(stage.gram(source), source, DAMPING, act_order=True)


class _Progress:
    """Reports progress; the cost of a weight is the number of elements from it to the end of the model."""

    def __init__(self, name: str, weights: Mapping[ir.Value, tuple[WeightSite, ...]]) -> None:
        self._name, self._done, following = name, 0, 0
        self._cost: dict[tuple[WeightSite, ...], int] = {}
        for sites in reversed(list(weights.values())):
            following += num_elements(sites[0].weight)
            self._cost[sites] = following
        self._total = sum(self._cost.values())

    def done(self, sites: tuple[WeightSite, ...]) -> None:
        """Count a weight as measured."""
        self._done += self._cost[sites]
        report_progress(self._name, self._done, self._total)
