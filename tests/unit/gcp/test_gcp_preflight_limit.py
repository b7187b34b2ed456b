"""`plan --preflight` on Google Cloud ends in time, however slow Google is; no test here waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import requests

from clusterctl.hosts.checks import Finding
from clusterctl.providers.gcp import preflight as looking
from clusterctl.providers.gcp.api import Api
from clusterctl.providers.gcp.preflight import preflight
from clusterctl.providers.gcp.provider import services
from clusterctl.spec.gcp import settings_of
from clusterctl.spec.load import parse_spec
from clusterctl.util.progress import Limit
from tests.support.google import discovery
from tests.support.google.api import PROJECT, TOKEN, Google
from tests.support.played_time import PlayedTime

MOST_S = 30.0  # what the manual promises
NEVER = float("inf")
SPEC = f"""\
version: 1
name: demo
provider: {{type: gcp, project: {PROJECT}, zone: us-central1-a}}
partitions:
{{}}
""".replace("{}", "".join(f"  - {{name: p{one}, nodes: 2, gpus: {{type: l4}}}}\n" for one in range(7)))


class SlowSession(requests.Session):
    """Google, where a call takes as long as ``takes`` says; without an answer in time it ends as requests'.

    ``timeout`` is of connecting, and of a single read (requests.readthedocs.io, "Timeouts", 2026-11).
    """

    def __init__(self, time: PlayedTime, takes: Callable[[str], float]) -> None:
        super().__init__()
        self.headers.update({"Authorization": f"Bearer {TOKEN}", "X-Goog-User-Project": PROJECT})
        self.time, self._takes = time, takes

    def request(self, method: str, url: str, *, timeout: Any, **more: Any) -> requests.Response:  # type: ignore[override]
        connect_s, read_s = timeout
        assert connect_s > 0
        takes_s = self._takes(url)
        self.time.passes(min(takes_s, read_s))
        if takes_s > read_s:
            raise requests.ReadTimeout(f"Read timed out. (read timeout={read_s})")
        return super().request(method, url, **more)


@pytest.fixture(autouse=True)
def ready(google: Google) -> None:
    """Google's stand-in has read its documents, which takes seconds."""
    discovery.methods("compute")


def look(
    takes: Callable[[str], float],
    cluster_id: str | None = None,
    session: type[SlowSession] = SlowSession,
) -> tuple[tuple[Finding, ...], float]:
    """What is found, and when."""
    spec, time = parse_spec(SPEC, "cluster.yaml"), PlayedTime()
    limit = Limit.within(looking.LIMIT_S, time.clock)
    api = Api(PROJECT, answer_s=looking.ANSWER_S, limit=limit, session=session(time, takes))
    return preflight(spec, cluster_id, services(settings_of(spec)), api=api), time.latest


@pytest.mark.parametrize("cluster_id", [None, "a1b2c3"])
def test_a_google_that_is_silent_is_a_warning_and_no_missing_project(cluster_id: str | None) -> None:
    (one,), took = look(lambda _: NEVER, cluster_id)
    assert (one.level, one.code) == ("warning", "cloud-silent")
    assert took <= MOST_S


def test_a_service_that_is_silent_keeps_no_other_from_being_looked_at(google: Google) -> None:
    google.project.denied.add("iam.serviceAccounts.actAs")
    told = threading.Event()

    def takes(url: str) -> float:
        if "/compute/" in url:
            assert told.wait(60)
            return NEVER
        if url.endswith(":testIamPermissions"):
            told.set()
        return 0.0

    found, took = look(takes)
    assert took <= MOST_S
    assert [one.code for one in found if one.level == "error"] == ["permission"]
    unanswered = {name: one.code for one in found if one.level == "warning" for name in one.host.split(", ")}
    assert set(unanswered.values()) == {"cloud-silent", "not-looked-at"}
    assert unanswered["nvidia-l4 of partition p6"] == "not-looked-at"


def test_a_google_that_is_slow_keeps_nobody_from_up() -> None:
    """What there was no time for is named."""
    found, took = look(lambda _: 5.0)
    assert took <= MOST_S
    assert [(one.level, one.code) for one in found] == [("warning", "not-looked-at")]


def test_an_answer_that_does_not_end_is_waited_for_no_longer() -> None:
    """A timeout of requests' is of one read: an answer that comes byte by byte may take any time."""
    ended = threading.Event()

    class Trickling(SlowSession):
        def request(self, method: str, url: str, *, timeout: Any, **more: Any) -> requests.Response:  # type: ignore[override]
            if url.endswith("/zones/us-central1-a"):
                self.time.passes(MOST_S)
                ended.wait()
            return super().request(method, url, timeout=timeout, **more)

    try:
        found, _ = look(lambda _: 0.0, session=Trickling)
    finally:
        ended.set()
    (rest,) = found
    assert (rest.level, rest.code) == ("warning", "not-looked-at")
    assert "us-central1-a of provider.zone" in rest.host.split(", ")
