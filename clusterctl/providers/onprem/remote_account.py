"""Runs on a machine, as root: gives clusterctl its account there, or takes it away again. Python 3.6, alone.

    python3 -I -S - REQUEST <THE_PROGRAM

REQUEST and the answer are one JSON object each. Doing it again changes nothing. What it does is recorded
before it is done, in CLAIM, which also says whose the machine is.
"""

import fcntl
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

from clusterctl.util.remote_rights import acting, read_regular

CLAIM = Path("/etc/clusterctl/cluster.json")
LOCK = "/run/clusterctl-account.lock"
WAIT_S = 60
SUDOERS = Path("/etc/sudoers.d/clusterctl")
GATE = Path("/etc/clusterctl/sshd")
GATE_CONFIG = Path("/etc/clusterctl/sshd_config")
HOMES = "/home"
# Where homes come from elsewhere, root may not write there, or writes on all machines at once.
FOREIGN = ("nfs", "nfs4", "autofs", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "9p")
OWN_HOME = Path("/var/lib/clusterctl-admin")
SETTLE_S = 1.0
# Debian's sshd wants a folder that its service would make.
GATE_PROGRAM = """\
#!/bin/sh
# clusterctl's way to its account on this machine; `clusterctl down` removes it
[ -d /usr/share/empty.sshd ] || mkdir -p -m 0755 /run/sshd
exec {} -i -f {}
"""
GATE_SETTINGS = """\
# clusterctl's way to its account on this machine; `clusterctl down` removes it
HostKey "{}"
UsePAM yes
AuthenticationMethods publickey
PermitRootLogin no
PrintMotd no
Subsystem sftp internal-sftp
"""


class RefusedError(Exception):
    """What is asked for can't be done; the message is for the user."""

    def __init__(self, code: str, cause: str, fix: str) -> None:
        super().__init__(cause)
        self.answer = {"ok": False, "code": code, "cause": cause, "fix": fix}


def run(*argv: str, check: bool = True) -> str:
    done = subprocess.run(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False
    )
    if check and done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip()
        raise RefusedError("account", "`{}` failed: {}".format(" ".join(argv), said[-500:]), "")
    return done.stdout.decode("utf-8", "replace")


def claimed() -> Dict[str, Any]:
    """Whose the machine is; empty where it is nobody's."""
    try:
        found = json.loads(CLAIM.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def account(name: str) -> Optional[pwd.struct_passwd]:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


def text_of(path: Path) -> Optional[str]:
    """The content of a regular file of no great size, None for all else."""
    try:
        return read_regular(str(path)).decode("utf-8", "surrogateescape")
    except OSError:
        return None


def write(path: Path, text: str, mode: int, uid: int = 0, gid: int = 0) -> bool:
    """Write a file whole, unless it is so already; whether it was not."""
    try:
        found = path.stat()
        if text_of(path) == text and found.st_mode & 0o7777 == mode and found.st_uid == uid:
            return False
    except OSError:
        pass
    temporary = path.with_name(".{}.clusterctl".format(path.name))
    with suppress(FileNotFoundError):
        temporary.unlink()  # of a run that was killed; or laid there by whose folder it is, to lead elsewhere
    descriptor = os.open(str(temporary), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123
        os.fchmod(file.fileno(), mode)
        os.fchown(file.fileno(), uid, gid)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return True


def home_folder() -> Path:
    """Where the account's home goes."""
    best = ("", "")
    for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines():
        _, where, kind = line.split()[:3]
        if (HOMES + "/").startswith(where.rstrip("/") + "/") and len(where) >= len(best[0]):
            best = (where, kind)
    foreign = best[1] in FOREIGN or best[1].startswith("fuse")
    return OWN_HOME if foreign else Path(HOMES) / "clusterctl"


def join(asked: Dict[str, Any]) -> Dict[str, Any]:
    """Make the machine a cluster's: note it, then make the account with key and sudo."""
    before = claimed()
    if before.get("id", asked["id"]) != asked["id"]:
        raise RefusedError(
            "claimed",
            "it belongs to cluster {!r} ({}) already".format(before.get("name"), before["id"]),
            "take that one down first (`clusterctl down`), or take this machine out of the spec",
        )
    if shutil.which("visudo") is None:
        raise RefusedError("no-sudo", "sudo is not installed there", "install the package sudo")
    user = asked["user"]
    ours = before.get("account", account(user) is None)
    claim = {key: asked[key] for key in ("id", "name", "host", "user")}
    claim["account"] = ours
    CLAIM.parent.mkdir(mode=0o755, exist_ok=True)
    changed = write(CLAIM, json.dumps(claim, indent=1, sort_keys=True) + "\n", 0o644)
    if account(user) is None:
        make_account(user, asked["number"])
        changed = True
    changed = let_in(user, asked["key"]) or changed
    changed = let_become_root(user, asked.get("owner")) or changed
    return {"ok": True, "changed": changed, "allowed": allowed(user)}


def make_account(user: str, number: int) -> None:
    """Make the account, with the same uid and gid on all hosts: a job of it has those of where it comes from.

    A host where they are taken gives it others; `up` and `doctor` say so.
    """
    names = ["SYS_{}ID_{}={}".format(kind, end, number) for kind in "UG" for end in ("MIN", "MAX")]
    pinned = [word for name in names for word in ("-K", name)]
    argv = ["useradd", "--system", "--create-home", "--home-dir", str(home_folder()), "--shell", "/bin/bash"]
    # "*" is no password; "!" would be a locked account, into which some sshd let nobody.
    argv += ["--password", "*", "--comment", "clusterctl", "--user-group"]
    run(*argv, *pinned, user, check=False)
    if account(user) is None:
        run(*argv, user)


def let_in(user: str, key: str) -> bool:
    """Have the key among those that may log in as the account."""
    found = pwd.getpwnam(user)
    folder = Path(found.pw_dir) / ".ssh"
    file = folder / "authorized_keys"
    if not folder.parent.is_dir():
        folder.parent.mkdir(mode=0o700)
        os.chown(str(folder.parent), found.pw_uid, found.pw_gid)
    with acting(found):
        if not folder.is_dir():
            folder.mkdir(mode=0o700)
        lines = (text_of(file) or "").splitlines()
        if key in lines:
            return False
        write(file, "\n".join([*lines, key]) + "\n", 0o600, found.pw_uid, found.pw_gid)
    if Path("/sys/fs/selinux/enforce").exists():
        if found.pw_dir.startswith(HOMES + "/"):
            run("restorecon", "-R", str(folder))
        else:
            run("chcon", "-R", "-h", "-t", "ssh_home_t", str(folder))
    return True


def let_become_root(user: str, owner: Optional[Dict[str, Any]]) -> bool:
    """Let the account use sudo without a password; what sudo could not read is never put in place.

    On the machine that clusterctl runs on, its ``owner`` may open the gate without one, and nothing else.
    """
    text = "# clusterctl's own account; `clusterctl down` removes it\n{} ALL=(ALL:ALL) NOPASSWD: ALL\n"
    text = text.format(user)
    if owner is not None:
        make_gate(owner["host_key"])
        text += '#{} ALL=(root) NOPASSWD: {} ""\n'.format(owner["uid"], GATE)
    trial = Path("/run/clusterctl-sudoers")
    write(trial, text, 0o440)
    try:
        run("visudo", "-c", "-q", "-f", str(trial))
    finally:
        trial.unlink()
    return write(SUDOERS, text, 0o440)


def make_gate(host_key: str) -> None:
    """What starts an sshd for one connection on its standard streams: no port, nothing of its own sshd."""
    sshd = find_sshd()
    if sshd is None:
        raise RefusedError("no-sshd", "there is no sshd", "install the package openssh-server")
    write(GATE_CONFIG, GATE_SETTINGS.format(host_key), 0o644)
    write(GATE, GATE_PROGRAM.format(sshd, GATE_CONFIG), 0o755)


def find_sshd() -> Optional[str]:
    return shutil.which("sshd", path="/usr/sbin:/sbin:/usr/bin")


def allowed(user: str) -> List[str]:
    """sshd's settings that let in only some, for the case that the account turns out to be none of them."""
    sshd = find_sshd()
    if sshd is None:
        return []
    asked = "user={},host=localhost,addr=127.0.0.1".format(user)
    lines = run(sshd, "-T", "-C", asked, check=False).splitlines()
    return [line for line in lines if line.split(" ")[0] in ("allowusers", "allowgroups", "denyusers")]


def leave(asked: Dict[str, Any]) -> Dict[str, Any]:
    """Release the machine: the account goes, if it came with us; else its key and its right do."""
    before = claimed()
    if before.get("id", asked["id"]) != asked["id"]:
        return {"ok": True, "changed": False}  # it is another cluster's by now
    user = asked["user"]
    found = account(user)
    if found is not None and before.get("account", False):
        end_processes(found.pw_uid)
        run("userdel", "--remove", "--force", user)
        # systemd's own of the account count as failed by now, since their processes were ended.
        units = ["{}@{}.service".format(kind, found.pw_uid) for kind in ("user", "user-runtime-dir")]
        run("systemctl", "reset-failed", *units, check=False)
    elif found is not None:
        file = Path(found.pw_dir) / ".ssh/authorized_keys"
        with acting(found):
            lines = (text_of(file) or "").splitlines()
            if asked["key"] in lines:
                kept = "".join(line + "\n" for line in lines if line != asked["key"])
                write(file, kept, 0o600, found.pw_uid, found.pw_gid)
    for path in (SUDOERS, GATE, GATE_CONFIG, CLAIM):  # the claim last: until then all can be done again
        if path.exists():
            path.unlink()
    with suppress(OSError):  # there is something else
        CLAIM.parent.rmdir()
    return {"ok": True, "changed": True}


def end_processes(uid: int) -> None:
    """End what the account still runs: the connection that asked for this, for one."""
    time.sleep(SETTLE_S)
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if process.stat().st_uid == uid:
                    os.kill(int(process.name), sign)
            except OSError:
                continue
        time.sleep(0.2)


@contextmanager
def alone(path: str = LOCK) -> Iterator[None]:
    """One at a time; the file is root's alone, for whoever can read it can hold it."""

    def late(*_: Any) -> None:
        cause = "another clusterctl is at work on its account there"
        raise RefusedError("account", cause, "wait until it is done, or end that process")

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "r+", encoding="utf-8") as lock:  # noqa: PTH123
        os.fchmod(descriptor, 0o600)
        signal.signal(signal.SIGALRM, late)
        signal.alarm(WAIT_S)
        fcntl.flock(lock, fcntl.LOCK_EX)
        signal.alarm(0)
        yield


def main() -> None:
    asked = json.loads(sys.argv[1])
    os.environ["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
    os.environ["LC_ALL"] = "C"
    try:
        with alone():
            answer = {"join": join, "leave": leave}[asked["do"]](asked)
    except RefusedError as exc:
        answer = exc.answer
    except OSError as exc:
        answer = RefusedError("account", str(exc), "see that its disk can be written").answer
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
