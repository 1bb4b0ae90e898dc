"""Prometheus alerts of a service level: the times of a server's /metrics, at the share of requests that must keep it.

Each bound has its own alert. A request must keep all bounds, so a level may be missed by a little while none fires.
"""

from pathlib import Path

import yaml

from ingot.errors import UsageError
from ingot.planning.service_levels import LevelBounds
from ingot.runtime.steps.metrics import SECONDS_BUCKETS

_HISTOGRAMS = {
    "ttft": ("IngotLevelFirstToken", "vllm:time_to_first_token_seconds", "time to first token"),
    "tpot": ("IngotLevelTokenTime", "vllm:request_time_per_output_token_seconds", "time per output token"),
    "end_to_end": ("IngotLevelEndToEnd", "vllm:e2e_request_latency_seconds", "time of a request"),
}
_WINDOW, _LASTING = "5m", "10m"


def alert_rules(name: str, level: LevelBounds) -> str:
    """The text of a file of rules: one alert for each bound of the level, for every model of a server.

    UsageError for a bound above the last bucket of the histograms, at which the alert could not fire.
    """
    rules = []
    for time, bound in level.bounds.items():
        alert, metric, words = _HISTOGRAMS[time]
        if bound >= SECONDS_BUCKETS[-1]:
            raise UsageError(
                f"service level {name}: {time} is {bound:g} s, and a server's histograms end at"
                f" {SECONDS_BUCKETS[-1]:g} s: no alert can tell; give a lower bound"
            )
        rate = f'rate({metric}_bucket{{job="ingot"}}[{_WINDOW}])'
        quantile = f"histogram_quantile({level.percentile:g}, sum by (le, model_name) ({rate}))"
        summary = f"the {words} of more than {100 * (1 - level.percentile):.3g} % of the requests exceeds {bound:g} s"
        rules.append(
            {
                "alert": alert,
                "expr": f"{quantile} > {bound:g}",
                "for": _LASTING,
                "labels": {"severity": "warning", "service_level": name},
                "annotations": {"summary": f"{{{{ $labels.model_name }}}}: {summary} ({name})"},
            }
        )
    heading = f"# Service level {name}: {level.words}\n"
    groups = {"groups": [{"name": f"ingot-{name}", "rules": rules}]}
    return heading + yaml.safe_dump(groups, sort_keys=False, width=200)


def write_alert_rules(file: Path, name: str, level: LevelBounds) -> None:
    """Write the rules to a file, whose folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(alert_rules(name, level), encoding="utf-8")
