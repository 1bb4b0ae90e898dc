"""Compare the evidence of two artifacts that serve the same purpose, as a server does before it replaces one.

Gates compare an artifact with its own checkpoint, so a damaged checkpoint passes them. Two artifacts that were measured
on the same text can be compared with each other: by the windows that both have, where their tokens are the same.
"""

import numpy as np

from ingot.artifact import Artifact
from ingot.validation.evidence_json import SealedAccuracy, sealed_accuracy
from ingot.validation.statistics import Estimate, mean_interval, ratio_interval

_RATIO = 1.1
_CHANCE = 1.02
_MOST_RATIO = 1.5
_GATE = "perplexity_ratio"
_TOKENIZER = "tokenizer/tokenizer.json"
_LEAST_WINDOWS = 2


def evidence_change(old: Artifact, new: Artifact) -> str | None:
    """Describe how much worse the new artifact predicts the text of both evidences than its gates explain.

    None if it does not, and where the evidences have no text in common. ArtifactError for evidence that is not valid.
    """
    ratio = perplexity_ratio(old, new)
    limit = most_ratio(new)
    if ratio is None or ratio.low <= limit:
        return None
    before, now = (accuracy.candidate_perplexity for accuracy in _accuracies(old, new))
    return (
        f"its evidence is worse than that of the artifact that is served: a perplexity of {now:.4g} against"
        f" {before:.4g} on the same text, {ratio.value:.3g} times as much where both were measured (95 % interval"
        f" {ratio.low:.3g} to {ratio.high:.3g}), and at most {limit:.3g} times is allowed"
    )


def most_ratio(new: Artifact) -> float:
    """Return the greatest ratio of perplexities.

    An artifact with a gate on its ratio to its checkpoint may be that much worse than what is served, which may be a
    little better than the checkpoint by chance. A gate that allows everything does not: the limit is bounded.
    """
    limits = [gate.limit for gate in new.manifest.gates if gate.name == _GATE and gate.bound == "max"]
    return min(limits[0] * _CHANCE, _MOST_RATIO) if limits else _RATIO


def perplexity_ratio(old: Artifact, new: Artifact) -> Estimate | None:
    """Return the ratio of perplexities over the windows that both evidences have; None without two of them."""
    if old.manifest.files.get(_TOKENIZER) != new.manifest.files.get(_TOKENIZER):
        return None
    accuracies = _accuracies(old, new)
    if len(accuracies) < 2 or accuracies[0].text.sha256 != accuracies[1].text.sha256:
        return None
    before, now = ({(each.start, each.tokens): each.candidate_nll for each in one.items} for one in accuracies)
    common = sorted(before.keys() & now.keys())
    if len(common) < _LEAST_WINDOWS:
        return None
    return ratio_interval(np.array([(now[window] - before[window]) / window[1] for window in common]))


def paired_accuracy(one: SealedAccuracy, other: SealedAccuracy) -> dict[str, Estimate]:
    """Compare two artifacts window by window: the ratio of perplexities, the differences of KL and of top-1 agreement.

    One over other, and one minus other. Empty where they have no two windows of one text in common.
    """
    if one.text.sha256 != other.text.sha256:
        return {}
    sides = [{(each.start, each.tokens): each for each in side.items} for side in (one, other)]
    common = sorted(sides[0].keys() & sides[1].keys())
    if len(common) < _LEAST_WINDOWS:
        return {}
    pairs = [(sides[0][window], sides[1][window], window[1]) for window in common]
    return {
        "perplexity_ratio": ratio_interval([(a.candidate_nll - b.candidate_nll) / n for a, b, n in pairs]),
        "kl_mean": mean_interval([(a.kl - b.kl) / n for a, b, n in pairs]),
        "top1_agreement": mean_interval([(a.agreements - b.agreements) / n for a, b, n in pairs]),
    }


def _accuracies(*artifacts: Artifact) -> list[SealedAccuracy]:
    return [found for found in map(sealed_accuracy, artifacts) if found]
