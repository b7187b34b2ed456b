"""The doubles of the metadata server and the guest agent do what Google documents."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.support.google import guest_agent
from tests.support.google.guest import GUEST_ATTRIBUTES, METADATA, answer, published

FLAVOR = {"metadata-flavor": "Google"}
TREE = {
    "instance": {
        "attributes": {"enable-oslogin": "FALSE", "ssh-keys": "ada:ssh-ed25519 AAAA"},
        "name": "n1",
        "id": 7,
    },
    "project": {"attributes": {"a-b": "c"}, "project-id": "mine"},
}
KEYS = "instance/attributes/ssh-keys"


@pytest.mark.parametrize(
    ("target", "headers", "answered"),
    [
        (KEYS, {}, (403, "")),
        (KEYS, {"metadata-flavor": "google"}, (403, "")),
        (KEYS, {**FLAVOR, "x-forwarded-for": "1.2.3.4"}, (403, "")),
        ("instance/name", FLAVOR, (200, "n1")),
        ("project/attributes/?recursive=true", FLAVOR, (200, '{"a-b": "c"}')),
        ("project/attributes/ssh-keys", FLAVOR, (404, "")),
        ("instance/name/", FLAVOR, (404, "")),
        ("instance/", FLAVOR, (501, "")),
        ("instance/id", FLAVOR, (200, "7")),
        (
            "/project/?recursive=true&alt=json",
            FLAVOR,
            (200, '{"attributes": {"a-b": "c"}, "projectId": "mine"}'),
        ),
    ],
)
def test_metadata_double_answers_as_google_documents(
    target: str, headers: Mapping[str, str], answered: tuple[int, str]
) -> None:
    status, body, _ = answer(TREE, METADATA + target, headers)
    assert (status, body.decode() if status == 200 else "") == answered


@pytest.mark.parametrize(
    ("target", "headers", "enabled", "status"),
    [
        (f"{GUEST_ATTRIBUTES}hostkeys/ssh-ed25519", FLAVOR, "TRUE", 200),
        (f"{GUEST_ATTRIBUTES}hostkeys/ssh-ed25519", FLAVOR, "FALSE", 403),
        (f"{GUEST_ATTRIBUTES}hostkeys/ssh-ed25519", {}, "TRUE", 403),
        (f"{METADATA}instance/name", FLAVOR, "TRUE", 405),
    ],
)
def test_metadata_double_writes_only_guest_attributes(
    target: str, headers: Mapping[str, str], enabled: str, status: int
) -> None:
    instance = {"metadata": {"enable-guest-attributes": enabled}}
    assert published(instance, target, headers)[0] == status


@pytest.mark.parametrize(
    ("project", "instance", "users"),
    [
        ({"ssh-keys": "bob:three"}, {}, ["ada", "bob"]),
        ({"ssh-keys": "bob:three"}, {"block-project-ssh-keys": "TRUE"}, ["ada"]),
        ({"enable-oslogin": "TRUE"}, {}, []),
        ({"enable-oslogin": "TRUE"}, {"enable-oslogin": "FALSE"}, ["ada"]),
        ({}, {"enable-oslogin": "true"}, []),
        ({"enable-oslogin": "no"}, {}, ["ada"]),
    ],
)
def test_guest_agent_double_makes_accounts(
    project: dict[str, str], instance: dict[str, str], users: list[str]
) -> None:
    keys = {"ssh-keys": "ada:one\nada:two"}
    metadata = {"project": {"attributes": project}, "instance": {"attributes": keys | instance}}
    found = guest_agent.accounts(metadata)
    assert list(found) == users
    assert found.get("ada", ["one", "two"]) == ["one", "two"]
