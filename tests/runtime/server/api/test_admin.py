"""/admin/reload: as SIGHUP, with a key of its own, and what became of it."""

import threading
from typing import Any

import httpx2

from ingot.errors import IngotError
from ingot.runtime.engine.engine import Engine
from ingot.runtime.server.http.access import ApiKeys
from ingot.runtime.server.http.rate_limits import Holder, KeyLimits
from ingot.runtime.server.options import ServerOptions
from tests.runtime.engines import text_engine
from tests.runtime.server.servers import SECONDS, Running, running

OPTIONS = ServerOptions(drain_seconds=SECONDS, probation_seconds=0.0)


def keys(key: str) -> ApiKeys:
    return ApiKeys({key: Holder(key, KeyLimits())})


def post(server: Running, key: str | None, query: str = "", method: str = "POST") -> httpx2.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx2.request(method, f"{server.url}/admin/reload{query}", headers=headers, timeout=SECONDS)


def get(server: Running) -> dict[str, Any]:
    answer = post(server, "admin-key", method="GET")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def test_a_reload_takes_an_admin_key_and_no_other() -> None:
    with running(
        text_engine(),
        OPTIONS,
        keys=keys("user-key"),
        admin_keys=keys("admin-key"),
        reload=lambda name, is_new: text_engine(),
    ) as server:
        before = server.model()
        assert post(server, "user-key", method="GET").status_code == 401
        for key, message in ((None, "an admin key is required"), ("user-key", "the admin key is wrong")):
            refused = post(server, key)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert message in refused.json()["error"]["message"]
        assert server.model() is before
        answer = post(server, "admin-key")
        assert (answer.status_code, answer.json()["status"]) == (202, "reloading")
        server.until(lambda: server.model() is not before)
        assert httpx2.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer admin-key"}).status_code == 401


def test_the_result_of_a_reload_can_be_read_and_waited_for() -> None:
    found: list[Engine | IngotError] = [text_engine(), IngotError("gate perplexity_ratio failed"), text_engine()]

    def load(name: str, is_new: bool) -> Engine:
        one = found.pop(0)
        if isinstance(one, IngotError):
            raise one
        return one

    long = ServerOptions(drain_seconds=SECONDS, probation_seconds=SECONDS)
    for options, outcomes in ((OPTIONS, ("kept", "refused")), (long, ("probation",))):
        with running(text_engine(), options, admin_keys=keys("admin-key"), reload=load) as server:
            nothing = dict.fromkeys(("reason", "started", "swapped", "ended"))
            assert get(server) == {"status": "done", "models": [{"model": "fake", "state": "idle", **nothing}]}
            for outcome in outcomes:
                answer = post(server, "admin-key", "?wait=true")
                assert (answer.status_code, answer.json()["status"]) == (200, "done")
                server.until(lambda outcome=outcome: get(server)["models"][0]["state"] == outcome)
                model = get(server)["models"][0]
                assert model["reason"] == ("gate perplexity_ratio failed" if outcome == "refused" else None)
                assert (model["swapped"] is None) == (outcome == "refused")
                assert (model["ended"] is None) == (outcome == "probation")


def other_engine() -> Engine:
    """An engine of another model with the same vocabulary."""
    engine = text_engine()
    engine._executor._vocab = engine._executor._vocab[::-1].copy()  # type: ignore[attr-defined]
    return engine


def test_an_artifact_that_answers_otherwise_is_served_where_the_change_is_accepted() -> None:
    loads = [other_engine(), other_engine()]
    with running(
        text_engine(), OPTIONS, admin_keys=keys("admin-key"), reload=lambda name, is_new: loads.pop(0)
    ) as server:
        before = server.model()
        assert post(server, "admin-key", "?wait=true&accept_change=1").status_code == 400
        refused = post(server, "admin-key", "?wait=true").json()["models"][0]
        assert refused["state"] == "refused"
        assert (
            "its answers differ from those of the artifact that is served: a mean KL divergence of" in refused["reason"]
        )
        assert refused["reason"].endswith("POST /admin/reload?accept_change=true serves it nevertheless")
        assert server.model() is before
        assert post(server, "admin-key", "?wait=true&accept_change=true").json()["models"][0]["state"] != "refused"
        assert server.model() is not before


def test_a_reload_is_under_way_until_its_checks_have_ended() -> None:
    loading = threading.Event()

    def load(name: str, is_new: bool) -> Engine:
        assert loading.wait(SECONDS)
        return text_engine()

    with running(text_engine(), OPTIONS, admin_keys=keys("admin-key"), reload=load) as server:
        assert post(server, "admin-key").json()["status"] == "reloading"
        server.until(lambda: get(server)["models"][0]["state"] == "loading")
        assert get(server)["status"] == "reloading"
        loading.set()
        server.until(lambda: get(server)["status"] == "done")


def test_wait_is_true_or_false() -> None:
    with running(
        text_engine(), OPTIONS, admin_keys=keys("admin-key"), reload=lambda name, is_new: text_engine()
    ) as server:
        answer = post(server, "admin-key", "?wait=1")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "wait")
        assert "wait is '1'; it must be true or false" in answer.json()["error"]["message"]
        assert get(server)["status"] == "done"


def test_without_admin_keys_there_is_nothing_to_call() -> None:
    with running(text_engine(), OPTIONS, reload=lambda name, is_new: text_engine()) as server:
        assert post(server, "admin-key").status_code == 404
