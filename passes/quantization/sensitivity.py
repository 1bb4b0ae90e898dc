"""How much the model loses when one weight alone is quantized: mean KL of its logits on calibration data.

    for found in weight_sensitivities(model, calibration, schemes):       every weight under every scheme
        found.name, found.kl[scheme], found.output_error[scheme]

    divergences_of_each(model, calibration, {"layers.0.mlp.down_proj": make_weight, ...})      weights of your own

Nothing in the model changes. A weight is an initializer with all the nodes that read it: what shares a tensor (a tied
head, a layer that is used twice) is quantized together. What is upstream of a weight runs once for all of its schemes
(pipeline/calibrate/trials.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import onnx_ir as ir

from ingot.errors import PassError, did_you_mean, one_of
from ingot.passes.calibration import Calibration, CalibrationStage, Float32Array, Float64Array
from ingot.passes.progress import report_progress
from ingot.passes.quantization.gptq_rounding import DampedGram, damped_gram
from ingot.passes.quantization.scale_search import Scheme
from ingot.passes.quantization.weight_trials import Points, Rounding, Sensitivity, WeightTrials, trial_of
from ingot.passes.weight_sites import Role, WeightSite, weight_sites

DAMPING = 0.01


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
    """The cost of every scheme for every weight that is not quantized and has a reader of these roles, in graph order.

    exclude     patterns (fnmatch's) of weights to leave out, by module path or tensor name
    tokens      calibration tokens that a trial is run on, in whole sequences
    rounding    "gptq": trial weights are rounded for the inputs of their layer, as the pass gptq does without refining
    points      schemes of a weight that are run; "all", or the others are inferred as weight_trials.py says
    name        under which progress is reported

    PassError when a weight's inputs are zero on all data or not finite, and for what `stages` raises.
    """
    waiting = _weights(model, roles, exclude)
    progress, found = _Progress(name, waiting), []
    for stage in calibration.stages(model):
        recalled = stage.recall()
        remembered: dict[str, Float64Array] = {}
        for source, sites in _runnable(stage, waiting):
            if recalled is None:
                trials = WeightTrials(sites, schemes, rounding, _gram(stage, source))
                found.append(trials.sensitivity(stage, tokens, points))
            else:
                found.append(Sensitivity.from_table(sites, schemes, recalled[_key(sites)]))
            remembered[_key(sites)] = found[-1].table()
            progress.done(sites)
        if recalled is None:
            stage.remember(remembered)
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
    """Mean KL of the model's logits when the weight that this node reads is the given one, each alone.

    weights     node name (a linear layer, the head, the embedding) -> a function that makes [out, in] float32, called
                when it is wanted and not held; all nodes that read the same tensor are given it
    tokens      calibration tokens that each is run on, in whole sequences

    PassError for a name that reads no weight.
    """
    waiting = {key: sites for key, sites in _weights(model).items() if any(_named(sites, weights))}
    _refuse_unknown(weights, model)
    progress = _Progress(name, waiting)
    found: dict[str, float] = {}
    for stage in calibration.stages(model):
        runnable = [sites for _, sites in _runnable(stage, waiting)]
        trials = {node: trial_of(sites, weights[node]) for sites in runnable for node in _named(sites, weights)}
        if trials:
            found |= zip(trials, stage.divergences(list(trials.values()), tokens), strict=True)
        for sites in runnable:
            progress.done(sites)
        if not waiting:
            break
    return {node: found[node] for node in weights}


def _weights(
    model: ir.Model, roles: frozenset[Role] | None = None, exclude: Sequence[str] = ()
) -> dict[ir.Value, tuple[WeightSite, ...]]:
    """Weights with all their readers, in graph order; with roles those that are not quantized and not excluded."""
    found: dict[ir.Value, tuple[WeightSite, ...]] = {}
    for site in weight_sites(model):
        found[site.weight] = (*found.get(site.weight, ()), site)
    return {
        weight: sites
        for weight, sites in found.items()
        if roles is None
        or (
            any(site.role in roles for site in sites)
            and not sites[0].is_quantized
            and not any(site.matches(exclude) for site in sites)
        )
    }


def _key(sites: Sequence[WeightSite]) -> str:
    """Under which a stage is remembered."""
    return sites[0].weight.name or ""


def _named(sites: Sequence[WeightSite], weights: Mapping[str, object]) -> Iterator[str]:
    return (name for site in sites if (name := site.node.name or "") in weights)


def _refuse_unknown(weights: Mapping[str, object], model: ir.Model) -> None:
    known = {site.node.name or "" for site in weight_sites(model)}
    for name in weights:
        if name not in known:
            raise PassError(f"{name!r} reads no weight; those that do: {one_of(known)}.{did_you_mean(name, known)}")


def _runnable(
    stage: CalibrationStage, waiting: dict[ir.Value, tuple[WeightSite, ...]]
) -> Iterator[tuple[ir.Value | None, tuple[WeightSite, ...]]]:
    """Weights that can be tried at this stage, each with what its only reader reads: taken out of `waiting`.

    One with several readers, or an embedding, is tried at the first stage that comes: trials reach back to the
    embedding, and ahead to all later layers.
    """
    sources = {node: group.source for group in stage.groups for node in group.linears}
    for weight, sites in list(waiting.items()):
        first = next((site for site in sites if site.role == "embedding" or site.node in sources), None)
        if first is not None:
            yield (sources[first.node] if len(sites) == 1 and first.role != "embedding" else None), waiting.pop(weight)


def _gram(stage: CalibrationStage, source: ir.Value | None) -> DampedGram | None:
    if source is None:
        return None
    try:
        return damped_gram(stage.gram(source), DAMPING, act_order=True)
    except ValueError as error:
        raise PassError(f"{source.name!r} gives its linear layers {error}; give other calibration text") from error


class _Progress:
    """Tells how far the work is: a weight costs about what lies behind it, itself included."""

    def __init__(self, name: str, weights: Mapping[ir.Value, tuple[WeightSite, ...]]) -> None:
        self._name, self._done, behind = name, 0, 0
        self._cost: dict[tuple[WeightSite, ...], int] = {}
        for sites in reversed(list(weights.values())):
            behind += _elements(sites)
            self._cost[sites] = behind
        self._total = sum(self._cost.values())

    def done(self, sites: tuple[WeightSite, ...]) -> None:
        """One more weight is measured."""
        self._done += self._cost[sites]
        report_progress(self._name, self._done, self._total)


def _elements(sites: Sequence[WeightSite]) -> int:
    tensor = sites[0].weight.const_value
    assert tensor is not None, "the manager verifies that initializers hold tensors"
    return tensor.size
