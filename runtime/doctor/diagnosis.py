"""All rules on what was read."""

from ingot.runtime.doctor.engine_rules import ENGINE_RULES
from ingot.runtime.doctor.findings import Finding, ObservedFacts
from ingot.runtime.doctor.machine_rules import MACHINE_RULES
from ingot.runtime.doctor.traffic_rules import TRAFFIC_RULES


def diagnose(facts: ObservedFacts) -> list[Finding]:
    """Findings, the most costly first."""
    found = [rule(facts) for rule in (*ENGINE_RULES, *TRAFFIC_RULES, *MACHINE_RULES)]
    return sorted((each for each in found if each), key=lambda each: -each.weight)
