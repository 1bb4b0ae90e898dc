"""Calls of client libraries against a server, in the environment that has them: imports nothing of Ingot.

    python call_clients.py CLIENT URL MODEL KEY LIMITED_KEY
    python call_clients.py

Without a client it prints the names of all, each with its package. Else it prints one JSON object: the version of the
client's package, and for each call "ok" or its error; "missing" in place of the calls where the package is not
installed. A call counts only if its answer has the content of the request, and an error only if the client raises what
the server said. LIMITED_KEY is a key that may send one request a minute.
"""

import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from expected import Server, chain
from framework_clients import FRAMEWORK_CLIENTS
from sdk_clients import SDK_CLIENTS

CLIENTS = SDK_CLIENTS | FRAMEWORK_CLIENTS
STOP = ""
"""The name of what ends a client, in place of a call."""


def outcome(call: Callable[[], object]) -> str:
    """ "ok", or the error with those that caused it."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 (the table has it)
        return " ".join(chain(error).split())[:300]
    return "ok"


def main(client: str | None = None, *server: str) -> None:
    """Print the outcome of each call."""
    if client is None:
        print(json.dumps({name: package for name, (package, _) in CLIENTS.items()}))
        return
    package, calls_of = CLIENTS[client]
    os.environ.setdefault("OPENAI_API_KEY", "none")
    try:
        found: dict[str, object] = {"version": version(package)} if package else {}
        calls = calls_of(Server(*server))
    except (PackageNotFoundError, ImportError) as error:
        found = {"missing": f"{type(error).__name__}: {error}"[:300]}
    else:
        stop = calls.pop(STOP, None)
        found["calls"] = {name: outcome(call) for name, call in calls.items()}
        if stop is not None:
            stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
