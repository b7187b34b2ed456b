"""The stand-in of the metadata server, and what its agent makes of OS Login: as Google documents both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from clusterctl.util.progress import Clock
from tests.support.google import guest_agent
from tests.support.google.metadata import ROOT, answer

FLAVOR = {"metadata-flavor": "Google"}
TREE = {
    "instance": {"attributes": {"enable-oslogin": "FALSE", "ssh-keys": "ada:ssh-ed25519 AAAA"}, "name": "n1"},
    "project": {"attributes": {"enable-oslogin": "TRUE"}, "project-id": "mine"},
}


def get(target: str, headers: Mapping[str, str] = FLAVOR) -> tuple[int, str]:
    status, body, _ = answer(lambda: TREE, target, headers)
    return status, body.decode()


@pytest.mark.parametrize(
    "headers", [{}, {"metadata-flavor": "google"}, {**FLAVOR, "x-forwarded-for": "1.2.3.4"}]
)
def test_whoever_does_not_ask_on_purpose_or_comes_by_a_proxy_is_refused(headers: Mapping[str, str]) -> None:
    status, said = get(f"{ROOT}instance/attributes/ssh-keys", headers)
    assert status == 403
    assert "AAAA" not in said


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("instance/name", 200),
        ("project/attributes/?recursive=true", 200),
        ("project/attributes/ssh-keys", 404),
        ("instance/name/", 404),
        ("instance/", 501),
    ],
)
def test_texts_and_whole_folders_are_shown(target: str, status: int) -> None:
    shown = {"instance/name": "n1", "project/attributes/?recursive=true": '{"enable-oslogin": "TRUE"}'}
    answered, said = get(ROOT + target)
    assert answered == status
    assert said == shown.get(target, said)


def test_a_change_is_waited_for_until_it_comes_or_the_time_is_up() -> None:
    keys = {"ssh-keys": "ada:one"}
    passed = 0.0
    changes_at = 1.0

    def sleep(seconds: float) -> None:
        nonlocal passed
        passed += seconds
        if passed >= changes_at:
            keys["ssh-keys"] = "ada:two"

    clock = Clock(lambda: passed, sleep)

    def wait(etag: str, timeout_s: int = 60) -> tuple[Any, str]:
        query = f"recursive=true&wait_for_change=true&timeout_sec={timeout_s}&last_etag={etag}"
        _, body, headers = answer(
            lambda: {"instance": {"attributes": keys}}, f"{ROOT}?{query}", FLAVOR, clock
        )
        return json.loads(body)["instance"]["attributes"]["ssh-keys"], headers["ETag"]

    # Another ETag is answered at once, the same one when something has changed or the time is up.
    said, etag = wait("NONE")
    assert (said, passed) == ("ada:one", 0.0)
    assert wait(etag, timeout_s=0) == (said, etag)
    said, etag = wait(etag)
    assert (said, passed >= changes_at) == ("ada:two", True)


@pytest.mark.parametrize(
    ("project", "instance", "on"),
    [
        ("TRUE", None, True),
        ("TRUE", "FALSE", False),
        (None, "true", True),
        (None, None, False),
        ("no", None, False),
    ],
)
def test_os_login_is_as_the_instance_says_before_its_project(
    project: str | None, instance: str | None, on: bool
) -> None:
    said = {"project": project, "instance": instance}
    metadata = {
        where: {"attributes": {} if value is None else {"enable-oslogin": value}}
        for where, value in said.items()
    }
    assert guest_agent.has_os_login(metadata) is on


def test_a_project_s_keys_count_unless_the_instance_blocks_them() -> None:
    metadata = {
        "instance": {"attributes": {"ssh-keys": "ada:one\nada:two"}},
        "project": {"attributes": {"ssh-keys": "bob:three"}},
    }
    assert guest_agent.keys_of(metadata) == {"ada": ["one", "two"], "bob": ["three"]}
    metadata["instance"]["attributes"]["block-project-ssh-keys"] = "TRUE"
    assert guest_agent.keys_of(metadata) == {"ada": ["one", "two"]}
