"""The script for k6 runs in node with a stand-in for k6's modules; what it sends is answered by a server."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.data_paths import ROOT
from tests.runtime.engines import text_engine
from tests.runtime.server.servers import running

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs node, which runs the script in place of k6")

_MODULES = {
    "package.json": json.dumps(
        {"type": "module", "exports": {".": "./k6.js", "./http": "./http.js", "./metrics": "./metrics.js"}}
    ),
    "k6.js": """
export const check = (value, checks) =>
  Object.entries(checks).forEach(([name, holds]) => globalThis.record.checks.push([name, holds(value)]));
""",
    "http.js": """
export default {
  post(url, body, parameters) {
    globalThis.record.sent.push({ url, body, parameters });
    return { status: globalThis.statuses.shift(), timings: { waiting: 1.5 } };
  },
};
""",
    "metrics.js": """
class Metric {
  constructor(name) { this.name = name; }
  add(value) { globalThis.record.metrics.push([this.name, value]); }
}
export class Counter extends Metric {}
export class Trend extends Metric {}
""",
}
_DRIVER = """
const [environment, statuses] = process.argv.slice(2).map(JSON.parse);
Object.assign(globalThis, { __ENV: environment, statuses, record: { sent: [], checks: [], metrics: [] } });
const script = await import('./load.mjs');
while (statuses.length) script.default();
console.log(JSON.stringify({ ...record, options: script.options }));
"""


def run_script(folder: Path, statuses: list[int], **environment: str) -> dict[str, Any]:
    """Run the script once for each status that the server answers; what it sent, checked and counted."""
    modules = folder / "node_modules" / "k6"
    modules.mkdir(parents=True)
    for name, text in _MODULES.items():
        (modules / name).write_text(text)
    shutil.copy(ROOT / "examples/load/load.js", folder / "load.mjs")
    (folder / "driver.mjs").write_text(_DRIVER)
    command = [NODE or "", "driver.mjs", json.dumps(environment), json.dumps(statuses)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_requests_are_answered_and_outcomes_counted(tmp_path: Path) -> None:
    with running(text_engine()) as server:
        found = run_script(tmp_path, [200, 429, 500], URL=server.url, RATE="7", MODEL="fake", API_KEY="secret")
        (scenario,) = found["options"]["scenarios"].values()
        assert (scenario["executor"], scenario["rate"]) == ("constant-arrival-rate", 7)
        assert [holds for _, holds in found["checks"]] == [True, True, False]
        assert found["metrics"] == [["refused", 1], ["refusal_ms", 1.5]]
        sent = found["sent"][0]
        assert sent["parameters"]["headers"]["Authorization"] == "Bearer secret"
        body = json.loads(sent["body"]) | {"ignore_eos": True}  # the prompt is random: it may end the text early
        answer = httpx2.post(sent["url"], json=body, headers=sent["parameters"]["headers"])
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 64)


def test_thresholds_are_of_metrics_that_the_script_has(tmp_path: Path) -> None:
    found = run_script(tmp_path, [429])
    assert found["options"]["thresholds"].keys() == {"checks", "refusal_ms"}
    assert found["sent"][0]["url"] == "http://localhost:8000/v1/completions"
    assert "Authorization" not in found["sent"][0]["parameters"]["headers"]
    assert "model" not in json.loads(found["sent"][0]["body"])
