# ruff: noqa: UP032 - hosts may have Python 3.6
"""Writes or removes the file that names the cluster of a host. Runs on the host as root, as a single
program, Python 3.6.

    python3 -I -S - REQUEST <THE_PROGRAM

REQUEST and the answer are JSON objects. A repeated request changes nothing.
"""

import json
import os
import pwd
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, Mapping

from clusterctl.util.remote_rights import acting_as

CLAIM = Path("/etc/clusterctl/cluster.json")
# What host_changes has noted, for as long as `down` may have to say it.
RECORD = Path("/var/lib/clusterctl-host.json")
# Fields of CLAIM: the creator of the cluster, with machine, folder and time.
ORIGIN = ("created_by", "created_on", "created_in", "created_at")


class RefusedError(Exception):
    """The request can't be carried out. ``cause`` and ``fix`` are for the user."""

    def __init__(self, code: str, cause: str, fix: str, about: str) -> None:
        super().__init__(cause)
        self.code = code
        self.about = about
        self.cause = cause
        self.fix = fix

    @property
    def answer(self) -> Dict[str, Any]:
        return {
            "ok": False,
            "code": self.code,
            "about": self.about,
            "cause": self.cause,
            "fix": self.fix,
        }


def claimed() -> Dict[str, Any]:
    """Return the content of CLAIM, which names the host's cluster. Empty if it belongs to no
    cluster.
    """
    try:
        return parse_claim(CLAIM.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return {}


def parse_claim(text: str) -> Dict[str, Any]:
    """Parse the text of CLAIM. Raise a RefusedError if it names no cluster, because the machine may
    belong to any.
    """
    try:
        claim = json.loads(text)
    except ValueError:
        claim = None
    if not isinstance(claim, dict) or not isinstance(claim.get("id"), str):
        raise RefusedError(
            "record-damaged",
            "{} is damaged, so the machine's cluster is unknown".format(CLAIM),
            "copy the file from another machine of that cluster; or, if this machine belongs to no "
            "cluster, remove the file: `sudo rm {}`".format(CLAIM),
            about="claim",
        )
    return claim


def reject_other_cluster(claim: Mapping[str, Any], cluster_id: str) -> None:
    """Raise a RefusedError if the machine with this claim belongs to a cluster with another id."""
    if claim.get("id", cluster_id) != cluster_id:
        origin = claim_origin(claim)
        raise RefusedError(
            "in-use",
            "the machine belongs to cluster {!r} ({}){}".format(
                claim.get("name"), claim["id"], ", " + origin if origin else ""
            ),
            "to administer that cluster too, copy this folder of its creator and run `clusterctl up`; "
            "to remove it, its creator runs `down` (if its records are lost, `orphans remove`); or "
            "remove this machine from the spec",
            about="machine",
        )


def claim_origin(claim: Mapping[str, Any]) -> str:
    """Return the creator of a claim's cluster, with place and time. Empty: the claim is of an
    earlier clusterctl, which did not record it.
    """
    if not all(map(claim.get, ORIGIN)):
        return ""
    return "created by {} on {} ({}) on {}".format(*map(claim.get, ORIGIN))


def join(request: Dict[str, Any]) -> None:
    """Record in CLAIM that the host joins a cluster, unless it belongs to one."""
    CLAIM.parent.mkdir(mode=0o755, exist_ok=True)
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    claim = {"created_at": now, **request["claim"]}
    draft = CLAIM.with_name(".cluster.json.{}".format(os.getpid()))
    draft.write_text(json.dumps(claim, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    try:
        # If two clusters join the host at once, the second is refused.
        os.link(str(draft), str(CLAIM))
    except FileExistsError:
        reject_other_cluster(claimed(), request["claim"]["id"])
    finally:
        draft.unlink()


def leave(request: Dict[str, Any]) -> None:
    """Remove RECORD, CLAIM, and the remains of a killed Ansible. A host of another cluster stays as it
    is.
    """
    if claimed().get("id", request["claim"]["id"]) != request["claim"]["id"]:
        return
    for path in (RECORD, CLAIM):
        with suppress(FileNotFoundError):
            path.unlink()
    # The folder may contain other files.
    with suppress(OSError):
        CLAIM.parent.rmdir()
    for user in ("root", os.environ.get("SUDO_USER", "root")):
        # sudo knows the number of an account whose directory is away, but not its home.
        with suppress(KeyError):
            account = pwd.getpwnam(user)
            with acting_as(account.pw_uid, account.pw_gid):
                remove_ansibles_files(Path(account.pw_dir) / ".ansible")


def remove_ansibles_files(folder: Path) -> None:
    """Remove the folders of modules that a killed `up` was running, and empty folders above."""
    for path in folder.glob("tmp/ansible_mitogen_runner_*"):
        shutil.rmtree(str(path), ignore_errors=True)
    for path in (folder / "tmp", folder):
        with suppress(OSError):
            path.rmdir()


def main() -> None:
    request = json.loads(sys.argv[1])
    # All users read CLAIM, even if the host sets umask 077.
    os.umask(0o022)
    answer = {"ok": True}  # type: Dict[str, Any]
    try:
        {"join": join, "leave": leave}[request["do"]](request)
    except RefusedError as exc:
        answer = exc.answer
    except OSError as exc:
        answer = RefusedError(
            "file-unwritable", str(exc), "check that the host's disk is writable", about="claim"
        ).answer
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
