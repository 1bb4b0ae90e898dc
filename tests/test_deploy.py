"""Files of deploy/ against the server: paths, options, times and names of metrics exist and fit together."""

import json
import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest
import yaml

from ingot.cli.engine_options import engine_options
from ingot.cli.main import COMMANDS
from ingot.errors import UsageError
from ingot.planning.choice.alerts import alert_rules
from ingot.planning.service_levels import LevelBounds, find_service_level
from ingot.runtime.engine.metrics_export import METRICS
from ingot.runtime.server.app import make_app
from ingot.runtime.server.options import ServerOptions
from ingot.runtime.server.service import Service
from tests.data_paths import ROOT
from tests.each_case import each_case
from tests.packaging.test_packaging import SOURCES, SUFFIXES, tree_files
from tests.runtime.engines import text_engine
from tests.runtime.server.servers import running

DEPLOY = ROOT / "deploy"
_FLUSH_SECONDS = 20  # what the end of a process takes at most after the drain, see docs/serve.md
_PROMQL_WORDS = {
    "rate",
    "increase",
    "sum",
    "by",
    "le",
    "status",
    "model_name",
    "histogram_quantile",
    "and",
    "job",
    "up",
    "on",
    "m",
}


def documents(path: Path) -> list[Any]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def containers(document: Any) -> list[dict[str, Any]]:
    """Containers of a workload or of a serving runtime."""
    spec = document.get("spec", {})
    found: list[dict[str, Any]] = spec.get("template", {}).get("spec", {}).get("containers") or spec.get(
        "containers", []
    )
    return found


def workloads() -> list[Any]:
    return [each for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")) for each in documents(path)]


def options_of(arguments: list[str]) -> dict[str, str]:
    """Options of `ingot serve` and their values."""
    return {name: value for name, value in pairwise(arguments) if name.startswith("--")}


def command_lines() -> dict[str, list[str]]:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["ingot"]["command"]
    unit = re.search(r"^ExecStart=\S+ serve (.*)$", (DEPLOY / "ingot.service").read_text(), re.MULTILINE)
    docker = re.search(r"^CMD (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert unit
    assert docker
    found = {"compose": compose, "systemd": unit[1].split(), "docker": json.loads(docker[1])}
    for document in workloads():
        for each in containers(document):
            found[f"{document['kind']} {document['metadata']['name']}"] = each["args"]
    return found


def test_every_command_line_is_one_of_ingot_serve() -> None:
    lines = command_lines()
    assert len(lines) == 5
    for name, arguments in lines.items():
        context = COMMANDS["serve"].make_context("serve", list(map(str, arguments)), resilient_parsing=False)
        assert context.params["artifact"].startswith("/"), name


def test_probes_name_paths_that_the_server_has_and_ports_that_it_listens_on() -> None:
    paths = {route.path for route in make_app(Service(ServerOptions())).routes}  # type: ignore[attr-defined]
    num_probes = 0
    for document in workloads():
        for container in containers(document):
            ports = {port["containerPort"] for port in container["ports"]} | {
                port.get("name") for port in container["ports"]
            }
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                if probe := container.get(kind):
                    assert probe["httpGet"]["path"] in paths
                    assert probe["httpGet"]["port"] in ports
                    num_probes += 1
            assert int(options_of(container["args"])["--port"]) in ports
    assert num_probes == 5


def test_a_drain_fits_into_every_grace_period() -> None:
    kinds = {each["kind"]: each for each in workloads()}
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    for grace, found in (
        (pod["terminationGracePeriodSeconds"], containers(kinds["Deployment"])),
        (
            kinds["InferenceService"]["spec"]["predictor"]["terminationGracePeriodSeconds"],
            containers(kinds["ClusterServingRuntime"]),
        ),
    ):
        (container,) = found
        pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        drain = float(options_of(container["args"])["--drain-seconds"])
        assert grace >= pause + drain + _FLUSH_SECONDS
    deployed = kinds["InferenceService"]["metadata"]["annotations"]["serving.kserve.io/deploymentMode"]
    assert deployed == "RawDeployment", "Knative refuses preStop"
    unit = (DEPLOY / "ingot.service").read_text()
    stop = re.search(r"TimeoutStopSec=(\d+)", unit)
    assert stop
    assert int(stop[1]) >= float(options_of(command_lines()["systemd"])["--drain-seconds"]) + _FLUSH_SECONDS
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["ingot"]
    drain = float(options_of(compose["command"])["--drain-seconds"])
    assert int(compose["stop_grace_period"].rstrip("s")) >= drain + _FLUSH_SECONDS


def test_compose_finds_its_files_from_its_own_folder() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    build = services["ingot"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    mounts = [mount.split(":")[0] for service in services.values() for mount in service["volumes"]]
    paths = [mount for mount in mounts if not mount.startswith("${")]
    assert len(paths) == 5
    assert [path for path in paths if not path.startswith("./") or not (DEPLOY / path).is_file()] == []
    commands = [
        command
        for path in (DEPLOY / "compose.yaml", DEPLOY / "README.md")
        for command in re.findall(r"ARTIFACT=\S+ docker compose .*?(?=`|$)", path.read_text(), re.MULTILINE)
    ]
    assert commands == 2 * ["ARTIFACT=$PWD/artifacts/demo docker compose -f deploy/compose.yaml up"]


def test_systemd_reloads_by_the_signal_of_the_server_and_lets_it_write_its_cache() -> None:
    unit = dict(
        line.split("=", 1)
        for line in (DEPLOY / "ingot.service").read_text().splitlines()
        if "=" in line and not line.startswith("#")
    )
    assert unit["ExecReload"] == "/bin/kill -HUP $MAINPID"
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["ingot"]
    assert unit["Restart"] == compose["restart"] == "on-failure", "it ends with an error once no engine serves"
    assert unit["Environment"] == f"INGOT_CACHE=/var/cache/{unit['CacheDirectory']}", "ProtectSystem forbids others"
    advised = re.findall(r"--set (\w+=\w+)", (DEPLOY / "ingot.service").read_text())
    assert {name.partition("=")[0] for name in advised} == {"kv_disk_bytes", "kv_disk_path"}
    assert engine_options(advised)


def ignored(path: str, patterns: list[str]) -> bool:
    """Whether .dockerignore keeps a path out: by the last pattern that matches it or a folder of it."""
    parts = path.split("/")
    found = False
    for pattern in patterns:
        glob = pattern.lstrip("!").removeprefix("**/")
        starts = range(len(parts)) if "**/" in pattern else (0,)
        if any(
            fnmatch("/".join(parts[start:end]), glob) for start in starts for end in range(start + 1, len(parts) + 1)
        ):
            found = not pattern.startswith("!")
    return found


def test_the_image_is_built_from_all_that_the_wheel_needs_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = [str(Path("src", name)) for name in tree_files(SUFFIXES | SOURCES)]
    needed += [str((ROOT / name).resolve().relative_to(ROOT)) for name in needed]
    needed += ["pyproject.toml", "hatch_build.py", "README.md", *project["license-files"]]
    assert len(needed) > 1000
    assert [name for name in needed if ignored(name, patterns)] == []
    others = [
        *(".git/config", ".venv/bin/python", ".venv-peers/a", ".env", "keys.txt", "tests/test_deploy.py"),
        *("artifacts/demo/manifest.json", "examples/models/a/b.safetensors"),
        *("runtime/__pycache__/engine.pyc", "runtime/cpu/native/ingot_cpu.so"),
    ]
    assert [name for name in others if not ignored(name, patterns)] == []


def test_the_image_has_the_extras_that_the_api_needs() -> None:
    default = re.search(r"^ARG EXTRAS=(\S+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert default
    assert {"serve", "structured", "trace"} <= set(default[1].split(","))


def test_selectors_find_their_pods_and_claims_their_volumes() -> None:
    by_kind = {each["kind"]: each for each in workloads()}
    labels = by_kind["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for selector in (
        by_kind["Deployment"]["spec"]["selector"]["matchLabels"],
        by_kind["Service"]["spec"]["selector"],
        by_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    shared = by_kind["PodMonitor"]["spec"]["selector"]["matchLabels"]
    assert shared.items() <= labels.items()
    assert shared.items() <= by_kind["ClusterServingRuntime"]["spec"]["labels"].items()
    (endpoint,) = by_kind["PodMonitor"]["spec"]["podMetricsEndpoints"]
    for kind in ("Deployment", "ClusterServingRuntime"):
        assert endpoint["port"] in {port["name"] for each in containers(by_kind[kind]) for port in each["ports"]}
    assert by_kind["ScaledObject"]["spec"]["scaleTargetRef"]["name"] == by_kind["Deployment"]["metadata"]["name"]
    pod = by_kind["Deployment"]["spec"]["template"]["spec"]
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


@pytest.fixture(scope="module")
def metric_names() -> set[str]:
    """Names that a server exports."""
    options = ServerOptions(price_per_hour=2.0)
    with running(text_engine(), options, reload=lambda name, is_new: text_engine()) as server:
        httpx2.get(f"{server.url}/version")  # answers are counted from the first one on
        text = httpx2.get(f"{server.url}/metrics").text
    found = {line.partition("{")[0].partition(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    tiers = [metric for metric in METRICS if metric.source.startswith("kv_tiers.")]  # this engine has none
    return found | {metric.exported_name for metric in tiers}


def level_rules() -> list[dict[str, Any]]:
    """Alerts of a level that bounds every time."""
    level = LevelBounds(words="all", ttft=1, tpot=0.1, end_to_end=20)
    found: list[dict[str, Any]] = yaml.safe_load(alert_rules("all", level))["groups"][0]["rules"]
    return found


def expressions() -> list[str]:
    dashboard = json.loads((DEPLOY / "monitoring/dashboard.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = yaml.safe_load((DEPLOY / "monitoring/alerts.yaml").read_text())["groups"][0]["rules"]
    found += [rule["expr"] for rule in rules + level_rules()]
    scaled = [each for each in workloads() if each["kind"] == "ScaledObject"]
    return found + [trigger["metadata"]["query"] for each in scaled for trigger in each["spec"]["triggers"]]


def test_dashboard_alerts_and_scaling_use_metrics_that_exist(metric_names: set[str]) -> None:
    found = expressions()
    assert len(found) > 20
    for expression in found:
        text = re.sub(r'"[^"]*"|\{[^}]*\}', "", expression)
        names = set(re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", text)) - _PROMQL_WORDS
        names = {name for name in names if not re.fullmatch(r"m|s", name)}
        assert names <= metric_names | {"up"}, expression
        assert text.count("(") == text.count(")")


def test_metrics_that_other_servers_have_are_selected_by_the_job_of_every_scrape() -> None:
    for expression in expressions():
        names = re.findall(r"(?:vllm:|process_)\w+|\bup\b", expression)
        assert len(re.findall(r'(?:(?:vllm:|process_)\w+|\bup)\{job="ingot"\}', expression)) == len(names), expression
    jobs = [
        each["job_name"]
        for name in ("prometheus.yaml", "prometheus-kubernetes.yaml")
        for each in yaml.safe_load((DEPLOY / "monitoring" / name).read_text())["scrape_configs"]
    ]
    by_kind = {each["kind"]: each for each in workloads()}
    label = by_kind["PodMonitor"]["spec"]["jobLabel"]
    jobs.append(by_kind["Deployment"]["spec"]["template"]["metadata"]["labels"][label])
    jobs.append(by_kind["ClusterServingRuntime"]["spec"]["labels"][label])
    assert jobs == 4 * ["ingot"]


def test_every_alert_has_a_test_in_which_it_fires() -> None:
    rules = yaml.safe_load((DEPLOY / "monitoring/alerts.yaml").read_text())["groups"][0]["rules"]
    tests = yaml.safe_load((DEPLOY / "monitoring/alerts_test.yaml").read_text())["tests"]
    fired = {each["alertname"] for test in tests for each in test["alert_rule_test"] if each.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in rules}


def test_a_dashboard_does_not_overlap() -> None:
    dashboard = json.loads((DEPLOY / "monitoring/dashboard.json").read_text())
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


_CUSTOM_KINDS = {"ScaledObject", "ClusterServingRuntime", "InferenceService", "PodMonitor"}


def test_manifests_follow_the_schemas_of_kubernetes() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    checked = [each for each in workloads() if each["kind"] not in _CUSTOM_KINDS]
    assert {each["kind"] for each in checked} == {"Deployment", "Service", "PodDisruptionBudget"}
    for document in checked:
        validator.validate(document, validator.latest_version(), strict=True)


@each_case("kind", sorted(_CUSTOM_KINDS))
def test_custom_resources_follow_the_schemas_of_their_operators(kind: str) -> None:
    schemas = json.loads((ROOT / "tests/custom_resources.json").read_text())
    schema = jsonschema.Draft7Validator({"$ref": f"#/definitions/{kind}", **schemas})
    (document,) = [each for each in workloads() if each["kind"] == kind]
    assert not [error.message for error in schema.iter_errors(document)]
    assert list(schema.iter_errors({**document, "spec": {**document["spec"], "replica": 1}})), "no field of its spec"
    found = containers(document)
    if found:
        validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "of-it"}, "spec": {"containers": found}}
        validator.validate(pod, validator.latest_version(), strict=True)


def promtool(*arguments: str) -> None:
    """Run promtool, which has to find nothing wrong."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed; Debian has it in the package prometheus")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_when_they_should() -> None:
    promtool("check", "rules", str(DEPLOY / "monitoring/alerts.yaml"))
    promtool("test", "rules", str(DEPLOY / "monitoring/alerts_test.yaml"))


def test_alerts_of_a_service_level_fire_beyond_its_bounds_alone(tmp_path: Path) -> None:
    (tmp_path / "alerts.yaml").write_text(alert_rules("chat", find_service_level("chat")))
    buckets = {
        "vllm:time_to_first_token_seconds_bucket": ("0.5", "1", "0+98x30"),
        "vllm:request_time_per_output_token_seconds_bucket": ("0.05", "0.1", "0+100x30"),
    }
    series = [
        {"series": f'{name}{{job="ingot", model_name="demo", le="{le}"}}', "values": values}
        for name, (bound, above, within) in buckets.items()
        for le, values in ((bound, within), (above, "0+100x30"), ("+Inf", "0+100x30"))
    ]
    fired = {
        "exp_labels": {"severity": "warning", "service_level": "chat", "model_name": "demo"},
        "exp_annotations": {
            "summary": "demo: the time to first token of more than 1 % of the requests exceeds 0.5 s (chat)"
        },
    }
    wanted = [
        {"eval_time": "20m", "alertname": "IngotLevelFirstToken", "exp_alerts": [fired]},
        {"eval_time": "20m", "alertname": "IngotLevelTokenTime", "exp_alerts": []},
    ]
    test = {"interval": "1m", "input_series": series, "alert_rule_test": wanted}
    text = yaml.safe_dump({"rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": [test]})
    (tmp_path / "test.yaml").write_text(text)
    promtool("test", "rules", str(tmp_path / "test.yaml"))


def test_an_alert_that_could_not_fire_is_refused() -> None:
    level = LevelBounds(words="slow", end_to_end=2000)
    with pytest.raises(UsageError, match=r"end_to_end is 2000 s, and a server's histograms end at 1000 s"):
        alert_rules("slow", level)


def test_prometheus_reads_its_configuration_and_every_expression(tmp_path: Path) -> None:
    text = (DEPLOY / "monitoring/prometheus.yaml").read_text()
    (tmp_path / "prometheus.yaml").write_text(text.replace("/etc/prometheus", str(DEPLOY / "monitoring")))
    promtool("check", "config", str(tmp_path / "prometheus.yaml"))
    scrape = yaml.safe_load((DEPLOY / "monitoring/prometheus-kubernetes.yaml").read_text())
    assert scrape["scrape_configs"][0].pop("kubernetes_sd_configs") == [{"role": "pod"}]  # Debian's promtool lacks it
    (tmp_path / "kubernetes.yaml").write_text(yaml.safe_dump(scrape))
    promtool("check", "config", str(tmp_path / "kubernetes.yaml"))
    rules = [{"record": f"each:{number}", "expr": expr} for number, expr in enumerate(expressions())]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    promtool("check", "rules", str(tmp_path / "rules.yaml"))
