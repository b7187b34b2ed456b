"""SSH to instances: host keys from guest attributes, and the tunnel of Identity-Aware Proxy."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from typing import Final

from clusterctl.errors import CloudError, Failure, MachineError, ProvisionError
from clusterctl.providers.gcp.api import Api
from clusterctl.util.process import run

KIND = "ssh-ed25519"
WAIT_S = 300.0
_LOOK_EVERY_S = 3.0
_NOT_FOUND = 404
_KEY = re.compile(r"AAAAC3NzaC1lZDI1NTE5AAAAI[A-Za-z0-9+/=]+")


def host_keys(
    api: Api, zone: str, names: Iterable[str], *, report: Callable[[str], None], timeout_s: float = WAIT_S
) -> dict[str, str]:
    """Host -> its public key, as `ssh-ed25519 AAAA...`; waits for instances that have just started.

    Raises:
        ProvisionError: some did not publish theirs in time; ``failures`` names each.
        CloudError: Google refused to show them.
    """
    missing = list(dict.fromkeys(names))
    found: dict[str, str] = {}
    give_up = api.clock.now() + timeout_s
    while True:
        for name in missing:
            if key := _published(api, zone, name):
                found[name] = f"{KIND} {key}"
        missing = [name for name in missing if name not in found]
        if not missing:
            return found
        if api.clock.now() >= give_up:
            raise _silent(api, zone, missing, timeout_s)
        report(f"waiting for the host keys of {len(missing)} of {len(missing) + len(found)} hosts")
        api.clock.sleep(_LOOK_EVERY_S)


def _published(api: Api, zone: str, name: str) -> str | None:
    path = f"projects/{api.project}/zones/{zone}/instances/{name}/getGuestAttributes"
    try:
        answer = api.get("compute", path, queryPath="hostkeys/")
    except CloudError as exc:
        if exc.status == _NOT_FOUND:  # it has published nothing yet
            return None
        raise
    items = answer.get("queryValue", {}).get("items", [])
    key = next((str(item["value"]) for item in items if item.get("key") == KIND), "")
    return key if _KEY.fullmatch(key) else None


def _silent(api: Api, zone: str, names: list[str], timeout_s: float) -> ProvisionError:
    failures = tuple(
        Failure(
            ProvisionError.code,
            f"{name} is {_status(api, zone, name)} and has not published its host key",
            host=name,
            fix=_serial_port(api, zone, name),
            retryable=True,
        )
        for name in names
    )
    return ProvisionError(
        f"{', '.join(names)}: no host key after {timeout_s:.0f} s",
        where=zone,
        why=failures[0].cause,
        fix=f"look at what it said while it started, {failures[0].fix}, then run `clusterctl up` again",
        failures=failures,
    )


def _status(api: Api, zone: str, name: str) -> str:
    try:
        instance = api.get("compute", f"projects/{api.project}/zones/{zone}/instances/{name}")
    except CloudError as exc:
        return "not there" if exc.status == _NOT_FOUND else "in a state that Google does not tell"
    return str(instance.get("status", "in no state"))


def _serial_port(api: Api, zone: str, name: str) -> str:
    return f"`gcloud compute instances get-serial-port-output {name} --zone {zone} --project {api.project}`"


_ANSWER_S: Final = 60.0
_INSTALL: Final = (
    "install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install), then: gcloud auth login"
)


def iap_tunnel(instance: str, *, project: str, zone: str) -> tuple[str, ...]:
    """The program that leads to an instance's SSH port; `%p` is that port."""
    return (
        *("gcloud", "compute", "start-iap-tunnel", instance, "%p", "--listen-on-stdin"),
        *(f"--project={project}", f"--zone={zone}", "--verbosity=error"),
    )


def check_gcloud() -> None:
    """That `gcloud` is installed and logged in.

    Raises:
        MachineError: it is not; no host could be reached.
    """
    if shutil.which("gcloud") is None:
        raise MachineError(
            "missing tool: gcloud", why="it carries SSH to hosts without a public address", fix=_INSTALL
        )
    argv = ["gcloud", "auth", "list", "--filter=status:ACTIVE", "--format=value(account)"]
    try:
        done = run(argv, timeout_s=_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise MachineError("gcloud does not run", why=str(exc), fix=_INSTALL) from exc
    if done.rc != 0:
        raise MachineError("gcloud does not run", why=done.reason, fix=_INSTALL)
    if not done.stdout.strip():
        raise MachineError(
            "gcloud is not logged in",
            why="it carries SSH to hosts without a public address",
            fix="log in: gcloud auth login",
        )
