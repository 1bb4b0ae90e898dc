"""An artifact's TensorRT plans as tables: what each holds, and what it launches in every profile."""

from ingot.artifact import Artifact
from ingot.artifact.plan_facts import PLANS_FILE, PlanFacts, PlanProfile, ProgramPlans
from ingot.cli.console import human_bytes, print_table


def print_plans(artifact: Artifact) -> None:
    """Nothing where the artifact has no plans."""
    if PLANS_FILE not in artifact.manifest.files:
        return
    plans = ProgramPlans.model_validate_json(artifact.file(PLANS_FILE).read_bytes()).plans
    first = plans[0]
    title = f"Plans of {first.library} {first.version} for SM {', '.join(map(str, first.sms))}"
    rows = [
        (plan.file, str(plan.segments), human_bytes(plan.bytes), human_bytes(plan.weight_bytes), _rows(plan))
        for plan in plans
    ]
    print_table(title, ("plan", "segments", "size", "weights in it", "rows"), rows, left=1)
    header = ("plan", "rows", "launches")
    print_table("Operators, of plans that launch the same as one", header, _operators(plans), left=3)


def _rows(plan: PlanFacts) -> str:
    return ", ".join(map(_range, plan.profiles))


def _range(profile: PlanProfile) -> str:
    least, most = profile.least_rows, profile.most_rows
    return str(least) if least == most else f"{least}-{most}"


def _operators(plans: tuple[PlanFacts, ...]) -> list[tuple[str, str, str]]:
    """Profiles that launch the same stand in one row, plans whose profiles all do in one group."""
    seen: set[str] = set()
    rows = []
    for plan in plans:
        by_operators: dict[str, list[str]] = {}
        for profile in plan.profiles:
            by_operators.setdefault(_counted(profile), []).append(_range(profile))
        group = repr(by_operators)
        if group not in seen:
            seen.add(group)
            rows += [(plan.file, ", ".join(ranges), operators) for operators, ranges in by_operators.items()]
    return rows


def _counted(profile: PlanProfile) -> str:
    counted = (f"{count} {name}" if count > 1 else name for name, count in profile.operators.items())
    return ", ".join(counted) or "not shown by the plan"
