#!/usr/bin/python3
"""What Google's guest agent does with accounts, on a machine that is taken for a Compute Engine instance.

As non_windows_accounts.go, oslogin.go (both in google_guest_agent/) and metadata/metadata.go of
GoogleCloudPlatform/guest-agent (2026-07) have it. Of OS Login it is what becomes of metadata's accounts:
those of profiles come by Google's NSS module, which is not here. Runs there alone: standard library only.
"""

from __future__ import annotations

import json
import pwd
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

ADDRESS = "169.254.169.254"
URL = f"http://{ADDRESS}/computeMetadata/v1/?recursive=true&alt=json&wait_for_change=true&timeout_sec=60&last_etag="
GROUPS = ("adm", "dip", "docker", "lxd", "plugdev", "video")
SUDOERS = Path("/etc/sudoers.d/google_sudoers")
TRUE = ("1", "t", "T", "TRUE", "true", "True")  # Go's strconv.ParseBool


def run(*argv: str) -> int:
    return subprocess.run(argv, check=False, stdout=subprocess.DEVNULL).returncode


def prepare() -> None:
    """The machine is one of ours below: a fresh image has none of our accounts."""
    run(
        "ip", "route", "replace", ADDRESS, "dev", "host0"
    )  # Google's routers know it; here it is on the bridge
    while run("id", "clusterctl") == 0:
        if run("userdel", "--force", "--remove", "clusterctl") != 0:
            time.sleep(0.2)
    Path("/etc/sudoers.d/clusterctl").unlink(missing_ok=True)


def watch(etag: str) -> tuple[dict[str, Any], str]:
    """All metadata, as soon as it is not that of this ETag; there is none until the instance is made."""
    while True:
        asked = urllib.request.Request(URL + etag, headers={"Metadata-Flavor": "Google"})  # noqa: S310
        try:
            with urllib.request.urlopen(asked, timeout=70) as answer:  # noqa: S310
                return json.load(answer), answer.headers["ETag"]
        except OSError:
            time.sleep(0.2)


def await_a_refusal() -> None:
    """sshd answers, and the host keys are published, before there are accounts: the first one is refused."""
    # From OpenSSH 9.8 on it is sshd-session that says so.
    argv = ["journalctl", "--quiet", "--identifier=sshd", "--identifier=sshd-session"]
    while "Invalid user" not in subprocess.run(argv, capture_output=True, text=True, check=False).stdout:
        time.sleep(0.2)


def has_os_login(metadata: dict[str, Any]) -> bool:
    """As the instance says; as the project does, where the instance says nothing."""
    said = metadata["project"]["attributes"] | metadata["instance"]["attributes"]
    return said.get("enable-oslogin", "") in TRUE


def keys_of(metadata: dict[str, Any]) -> dict[str, list[str]]:
    """User -> the keys that metadata has for that account."""
    instance, project = (metadata[name]["attributes"] for name in ("instance", "project"))
    lines = instance.get("ssh-keys", "").splitlines()
    if instance.get("block-project-ssh-keys", "") not in TRUE:
        lines += project.get("ssh-keys", "").splitlines()
    found: dict[str, list[str]] = {}
    for line in lines:
        user, colon, key = line.strip().partition(":")
        if user and colon:
            found.setdefault(user, []).append(key)
    return found


def set_accounts(wanted: dict[str, list[str]], ours: dict[str, list[str]]) -> None:
    """Have these accounts; those that were ``ours``, which it becomes, lose keys and sudo, and stay."""
    if not SUDOERS.exists():
        SUDOERS.write_text("%google-sudoers ALL=(ALL:ALL) NOPASSWD:ALL\n")
        SUDOERS.chmod(0o440)
    run("groupadd", "google-sudoers")
    for user, keys in wanted.items():
        if run("getent", "passwd", user) != 0:
            run("useradd", "-m", "-s", "/bin/bash", "-p", "*", user)
            for group in GROUPS:
                run("gpasswd", "-a", user, group)
        if user not in ours:
            run("gpasswd", "-a", user, "google-sudoers")
        if keys != ours.get(user):
            write_keys(user, keys)
    for user in ours.keys() - wanted.keys():
        write_keys(user, [])
        run("gpasswd", "-d", user, "google-sudoers")
    ours.clear()
    ours.update(wanted)


def write_keys(user: str, keys: list[str]) -> None:
    """The account's file gets these keys beside those that are not ours; without any it goes."""
    home = Path(pwd.getpwnam(user).pw_dir)
    file = home / ".ssh/authorized_keys"
    if not keys:
        file.unlink(missing_ok=True)
        return
    if not file.parent.exists():
        file.parent.mkdir(0o700)
        shutil.chown(file.parent, user, user)
    theirs, skip = [], False
    for line in file.read_text().splitlines() if file.exists() else ():
        if not skip and line != "# Added by Google":
            theirs.append(line)
        skip = not skip and line == "# Added by Google"
    fresh = file.with_name("authorized_keys.google")
    fresh.write_text(
        "".join(f"{line}\n" for line in [*theirs, *(f"# Added by Google\n{key}" for key in keys)])
    )
    fresh.chmod(0o600)
    shutil.chown(fresh, user, user)
    fresh.replace(file)


def main() -> None:
    prepare()
    ours: dict[str, list[str]] = {}
    metadata, etag = watch("NONE")
    await_a_refusal()
    while True:
        # What metadata has counts for nothing while OS Login is on, and again as soon as it is off.
        set_accounts({} if has_os_login(metadata) else keys_of(metadata), ours)
        metadata, etag = watch(etag)


if __name__ == "__main__":
    main()
