#!/usr/bin/python3
"""Google's guest agent on a machine that stands for an instance: host keys and accounts.

It follows instance_setup.go, non_windows_accounts.go and oslogin.go (all in google_guest_agent/) of
GoogleCloudPlatform/guest-agent (2026-07), and runs once: metadata and host keys do not change here.
It runs on the machine, with the standard library only.
"""

from __future__ import annotations

import json
import pwd
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

ADDRESS = "169.254.169.254"
URL = f"http://{ADDRESS}/computeMetadata/v1/"
GROUPS = ("adm", "dip", "docker", "lxd", "plugdev", "video")
TRUE = ("1", "t", "T", "TRUE", "true", "True")  # Go's strconv.ParseBool


def ask(path: str, data: bytes | None = None) -> bytes:
    method = "GET" if data is None else "PUT"
    headers = {"Metadata-Flavor": "Google"}
    asked = urllib.request.Request(URL + path, data, headers, method=method)  # noqa: S310
    with urllib.request.urlopen(asked, timeout=10) as answer:  # noqa: S310
        return bytes(answer.read())


def run(*argv: str) -> int:
    return subprocess.run(argv, check=False, stdout=subprocess.DEVNULL).returncode


def prepare() -> None:
    """The machine is one of ours below: a fresh image has none of our accounts."""
    # Google's routers know it; here it is on the bridge.
    run("ip", "route", "replace", ADDRESS, "dev", "host0")
    while run("id", "clusterctl") == 0:
        if run("userdel", "--force", "--remove", "clusterctl") != 0:
            time.sleep(0.2)
    Path("/etc/sudoers.d/clusterctl").unlink(missing_ok=True)


def await_metadata() -> dict[str, Any]:
    """There is none until the instance is made."""
    while True:
        try:
            return dict(json.loads(ask("?recursive=true")))
        except OSError:
            time.sleep(0.2)


def publish_host_keys() -> None:
    for file in Path("/etc/ssh").glob("ssh_host_*_key"):  # not all machines have the public ones
        argv = ["ssh-keygen", "-y", "-f", str(file)]
        kind, key, *_ = subprocess.run(
            argv, check=True, capture_output=True, text=True
        ).stdout.split()
        ask(f"instance/guest-attributes/hostkeys/{kind}", key.encode())


def await_a_refusal() -> None:
    """sshd answers, and the host keys are published, before there are accounts: the first one is
    refused.
    """
    # From OpenSSH 9.8 on it is sshd-session that says so.
    argv = ["journalctl", "--quiet", "--identifier=sshd", "--identifier=sshd-session"]
    while (
        "Invalid user"
        not in subprocess.run(argv, capture_output=True, text=True, check=False).stdout
    ):
        time.sleep(0.2)


def accounts(metadata: dict[str, Any]) -> dict[str, list[str]]:
    """User -> the keys that metadata has for that account; none of them counts while OS Login is
    on.
    """
    instance, project = (metadata[name]["attributes"] for name in ("instance", "project"))
    if (project | instance).get("enable-oslogin", "") in TRUE:
        return {}
    lines = instance.get("ssh-keys", "").splitlines()
    if instance.get("block-project-ssh-keys", "") not in TRUE:
        lines += project.get("ssh-keys", "").splitlines()
    found: dict[str, list[str]] = {}
    for line in lines:
        user, colon, key = line.strip().partition(":")
        if user and colon:
            found.setdefault(user, []).append(key)
    return found


def add(user: str, keys: list[str]) -> None:
    if run("getent", "passwd", user) != 0:
        run("useradd", "-m", "-s", "/bin/bash", "-p", "*", user)
        for group in GROUPS:
            run("gpasswd", "-a", user, group)
    run("gpasswd", "-a", user, "google-sudoers")
    file = Path(pwd.getpwnam(user).pw_dir) / ".ssh/authorized_keys"
    run("install", "-d", "-m", "0700", "-o", user, "-g", user, str(file.parent))
    run("install", "-m", "0600", "-o", user, "-g", user, "/dev/null", str(file))
    file.write_text("".join(f"# Added by Google\n{key}\n" for key in keys))


def main() -> None:
    prepare()
    wanted = accounts(await_metadata())
    publish_host_keys()
    await_a_refusal()
    run("groupadd", "google-sudoers")
    sudoers = Path("/etc/sudoers.d/google_sudoers")
    sudoers.write_text("%google-sudoers ALL=(ALL:ALL) NOPASSWD:ALL\n")
    sudoers.chmod(0o440)
    for user, keys in wanted.items():
        add(user, keys)


if __name__ == "__main__":
    main()
