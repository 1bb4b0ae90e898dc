"""POST /admin/reload: as SIGHUP, with a key of its own."""

import httpx2

from ingot.runtime.server.access import ApiKeys
from ingot.runtime.server.key_limits import Holder, Limits
from ingot.runtime.server.options import ServerOptions
from tests.runtime.engines import text_engine
from tests.runtime.server.servers import SECONDS, Running, running

OPTIONS = ServerOptions(drain_seconds=SECONDS, probation_seconds=0.0)


def keys(key: str) -> ApiKeys:
    return ApiKeys({key: Holder(key, Limits())})


def post(server: Running, key: str | None) -> httpx2.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx2.post(f"{server.url}/admin/reload", headers=headers)


def test_a_reload_takes_an_admin_key_and_no_other() -> None:
    with running(
        text_engine(),
        OPTIONS,
        keys=keys("user-key"),
        admin_keys=keys("admin-key"),
        reload=lambda name, is_new: text_engine(),
    ) as server:
        before = server.model()
        for key, message in ((None, "an admin key is required"), ("user-key", "the admin key is wrong")):
            refused = post(server, key)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert message in refused.json()["error"]["message"]
        assert server.model() is before
        answer = post(server, "admin-key")
        assert (answer.status_code, answer.json()) == (202, {"status": "reloading", "models": ["fake"]})
        server.until(lambda: server.model() is not before)
        assert httpx2.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer admin-key"}).status_code == 401


def test_without_admin_keys_there_is_nothing_to_call() -> None:
    with running(text_engine(), OPTIONS, reload=lambda name, is_new: text_engine()) as server:
        assert post(server, "admin-key").status_code == 404
