"""The server against its own OpenAPI document, by schemathesis: no answer that the document does not allow, no 5xx.

    python -m benchmarks.serve.schema [ARTIFACT] [--examples 300] [--output FILE]

Generated requests are right and wrong ones, of all operations and of sequences of them. All of schemathesis's checks
count but two: that a request which the schema allows is accepted, because it does not know the model (its longest
prompt, its names, its chat template), and that what was made can be read, because `store` may be false.
"""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from benchmarks.cpu.serve import server
from benchmarks.device import device_facts
from benchmarks.paths import ROOT

_EXCLUDED = ("positive_data_acceptance", "ensure_resource_availability")
_LONGEST_REQUEST = ("--request-seconds", "1")


def check(url: str, examples: int, *options: str, seed: int = 0) -> tuple[int, str]:
    """Exit code and report of a run with so many examples of each operation."""
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run"]
    command += [f"{url}/openapi.json", "--max-examples", str(examples), "--seed", str(seed), "--continue-on-failure"]
    command += ["--checks", "all", "--exclude-checks", ",".join(_EXCLUDED), "--no-color", *options]
    with TemporaryDirectory() as folder:  # it leaves a folder where it runs
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    return done.returncode, done.stdout + done.stderr


@click.command()
@click.argument("artifact", default=str(ROOT / "artifacts/demo"))
@click.option("--examples", default=300, show_default=True, help="Examples of each operation.")
@click.option("--output", type=click.Path(path_type=Path), default=ROOT / "benchmarks/results/serve-schema.json")
def main(artifact: str, examples: int, output: Path) -> None:
    """Print the report; exit code 1 when there is a violation."""
    with server(artifact, *_LONGEST_REQUEST) as url:
        code, report = check(url, examples)
    click.echo(report)
    cases = re.search(r"^ +(\d+) generated, (?:(\d+) passed|.* failures?)", report, re.MULTILINE)
    facts = {
        "device": device_facts(),
        "schemathesis": version("schemathesis"),
        "examples_per_operation": examples,
        "cases_generated": int(cases[1]) if cases else None,
        "all_passed": bool(cases and cases[2]),
        "exit_code": code,
    }
    output.write_text(json.dumps(facts, indent=2) + "\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
