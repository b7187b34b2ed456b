# ruff: noqa: UP022, UP032 - hosts may have Python 3.6
"""Creates or deletes clusterctl's account on a host. Runs on the host as root, as a single file,
Python 3.6.

    python3 -I -S - REQUEST <THE_PROGRAM

REQUEST and the answer are JSON objects. A repeated request changes nothing. Every change is
recorded in the file CLAIM before it is made. CLAIM also names the cluster that the host belongs to.
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
from typing import Any, Dict, Iterator, List, Mapping, Optional

from clusterctl.util.remote_rights import acting_as, read_regular

CLAIM = Path("/etc/clusterctl/cluster.json")
LOCK = "/run/clusterctl-account.lock"
WAIT_S = 60
SUDOERS = Path("/etc/sudoers.d/clusterctl")
GATE = Path("/etc/clusterctl/sshd")
GATE_CONFIG = Path("/etc/clusterctl/sshd_config")
HOMES = "/home"
# File systems on which root may not write, or on which it would write for all machines at once.
FOREIGN = (
    "9p afs autofs beegfs ceph cifs gpfs lustre nfs nfs4 panfs pvfs2 smb3 smbfs virtiofs wekafs"
).split()
OWN_HOME = Path("/var/lib/clusterctl-admin")
SETTLE_S = 1.0
# Fields of CLAIM: who created the cluster, on which machine, in which folder there, and when.
ORIGIN = ("created_by", "created_on", "created_in", "created_at")
# On Debian, sshd needs a folder that only its service creates.
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
    """The request can't be carried out. ``cause`` and ``fix`` are for the user."""

    def __init__(self, code: str, cause: str, fix: str) -> None:
        super().__init__(cause)
        self.code = code
        self.cause = cause
        self.fix = fix

    @property
    def answer(self) -> Dict[str, Any]:
        return {"ok": False, "code": self.code, "cause": self.cause, "fix": self.fix}


def run(*argv: str, check: bool = True) -> str:
    result = subprocess.run(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False
    )
    if check and result.returncode != 0:
        stderr = result.stderr.decode("utf-8", "replace").strip()
        raise RefusedError("account", "`{}` failed: {}".format(" ".join(argv), stderr[-500:]), "")
    return result.stdout.decode("utf-8", "replace")


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
            "claim-unreadable",
            "{} is damaged, so the machine's cluster is unknown".format(CLAIM),
            "copy the file from another machine of that cluster; or, if this machine belongs to no "
            "cluster, remove the file: `sudo rm {}`".format(CLAIM),
        )
    return claim


def reject_other_cluster(claim: Mapping[str, Any], cluster_id: str) -> None:
    """Raise a RefusedError if the machine with this claim belongs to a cluster with another id."""
    if claim.get("id", cluster_id) != cluster_id:
        origin = claim_origin(claim)
        raise RefusedError(
            "claimed",
            "the machine belongs to cluster {!r} ({}){}".format(
                claim.get("name"), claim["id"], ", " + origin if origin else ""
            ),
            "whoever created that cluster can remove it with `down` (if its records are lost, with "
            "`orphans remove`); or remove this machine from the spec",
        )


def claim_origin(claim: Mapping[str, Any]) -> str:
    """Return who created the cluster of a claim, where and when. Empty: the claim is of an earlier
    clusterctl, which did not record it.
    """
    if not all(map(claim.get, ORIGIN)):
        return ""
    return "created by {} on {} ({}) on {}".format(*map(claim.get, ORIGIN))


def account(name: str) -> Optional[pwd.struct_passwd]:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


def text_of(path: Path) -> Optional[str]:
    """Return a file's text. None: the file does not exist, is too large, or is not a regular
    file.
    """
    try:
        return read_regular(str(path)).decode("utf-8", "surrogateescape")
    except OSError:
        return None


def write(path: Path, text: str, mode: int, uid: int = 0, gid: int = 0) -> bool:
    """Replace a file atomically if its text, mode or owner differs. Return whether the file was
    replaced.
    """
    try:
        status = path.stat()
        if text_of(path) == text and status.st_mode & 0o7777 == mode and status.st_uid == uid:
            return False
    except OSError:
        pass
    temporary = path.with_name(".{}.clusterctl".format(path.name))
    # The name may be taken by a run that was killed, or by a link that the folder's owner placed as
    # a trap.
    with suppress(FileNotFoundError):
        temporary.unlink()
    descriptor = os.open(
        str(temporary), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600
    )
    with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
        os.fchmod(file.fileno(), mode)
        os.fchown(file.fileno(), uid, gid)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return True


def home_folder() -> Path:
    """Return the account's home folder: in /home, or in /var/lib if /home is a network file
    system.
    """
    deepest = ("", "")
    for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines():
        _, mount_point, kind = line.split()[:3]
        if (HOMES + "/").startswith(mount_point.rstrip("/") + "/") and len(mount_point) >= len(
            deepest[0]
        ):
            deepest = (mount_point, kind)
    foreign = deepest[1] in FOREIGN or deepest[1].startswith("fuse")
    return OWN_HOME if foreign else Path(HOMES) / "clusterctl"


def join(request: Dict[str, Any]) -> Dict[str, Any]:
    """Record in CLAIM that the host joins a cluster. Then create the account with its key and sudo
    rights.
    """
    claim_before = claimed()
    reject_other_cluster(claim_before, request["id"])
    if shutil.which("visudo") is None:
        raise RefusedError(
            "no-sudo", "sudo is not installed on the host", "install the package sudo"
        )
    user = request["user"]
    is_created_here = claim_before.get("account", account(user) is None)
    claim = {key: request[key] for key in ("id", "name", "host", "user")}
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    origin = {"created_at": now, **request.get("origin", {})}
    claim.update({key: claim_before.get(key, origin.get(key, "")) for key in ORIGIN})
    claim["account"] = is_created_here
    CLAIM.parent.mkdir(mode=0o755, exist_ok=True)
    changed = write(CLAIM, json.dumps(claim, indent=1, sort_keys=True) + "\n", 0o644)
    if account(user) is None:
        make_account(user, request["number"])
        changed = True
    changed = let_in(user, request["key"]) or changed
    changed = let_become_root(user, request.get("owner")) or changed
    is_new = not claim_before
    return {"ok": True, "changed": changed, "is_new": is_new, "allowed": allowed(user)}


def make_account(user: str, number: int) -> None:
    """Create the account. If possible, its uid and gid are ``number``, because Slurm runs jobs by
    uid.
    """
    names = ["SYS_{}ID_{}={}".format(kind, end, number) for kind in "UG" for end in ("MIN", "MAX")]
    pinned = [word for name in names for word in ("-K", name)]
    argv = [
        "useradd",
        "--system",
        "--create-home",
        "--home-dir",
        str(home_folder()),
        "--shell",
        "/bin/bash",
    ]
    # "*" disables the password. "!" would lock the account, and some versions of sshd refuse locked
    # accounts.
    argv += ["--password", "*", "--comment", "clusterctl", "--user-group"]
    run(*argv, *pinned, user, check=False)
    if account(user) is None:
        run(*argv, user)


def let_in(user: str, key: str) -> bool:
    """Add ``key`` to the account's authorized_keys, if it is missing. Return whether it was
    missing.
    """
    entry = pwd.getpwnam(user)
    folder = Path(entry.pw_dir) / ".ssh"
    file = folder / "authorized_keys"
    if not folder.parent.is_dir():
        folder.parent.mkdir(mode=0o700)
        os.chown(str(folder.parent), entry.pw_uid, entry.pw_gid)
    with acting_as(entry):
        if not folder.is_dir():
            folder.mkdir(mode=0o700)
        lines = (text_of(file) or "").splitlines()
        if key in lines:
            return False
        write(file, "\n".join([*lines, key]) + "\n", 0o600, entry.pw_uid, entry.pw_gid)
    if Path("/sys/fs/selinux/enforce").exists():
        if entry.pw_dir.startswith(HOMES + "/"):
            run("restorecon", "-R", str(folder))
        else:
            run("chcon", "-R", "-h", "-t", "ssh_home_t", str(folder))
    return True


def let_become_root(user: str, owner: Optional[Dict[str, Any]]) -> bool:
    """Let the account use sudo without a password. visudo checks the file before it is installed.

    owner: None, unless clusterctl itself runs on this host. Then ``owner["uid"]`` may run the
        script GATE, and nothing else, as root.
    """
    text = (
        "# clusterctl's own account; `clusterctl down` removes it\n"
        "Defaults:{0} !requiretty\n"
        'Defaults:{0} secure_path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"\n'
        "{0} ALL=(ALL:ALL) NOPASSWD: ALL\n"
    )
    text = text.format(user)
    if owner is not None:
        make_gate(owner["host_key"])
        text += 'Defaults!{0} !requiretty\n#{1} ALL=(root) NOPASSWD: {0} ""\n'.format(
            GATE, owner["uid"]
        )
    trial = Path("/run/clusterctl-sudoers")
    write(trial, text, 0o440)
    try:
        run("visudo", "-c", "-q", "-f", str(trial))
    finally:
        trial.unlink()
    return write(SUDOERS, text, 0o440)


def make_gate(host_key: str) -> None:
    """Write the script GATE. It starts an sshd for a single connection over stdin and stdout, not a
    port.
    """
    sshd = find_sshd()
    if sshd is None:
        raise RefusedError("no-sshd", "sshd is not installed", "install the package openssh-server")
    write(GATE_CONFIG, GATE_SETTINGS.format(host_key), 0o644)
    write(GATE, GATE_PROGRAM.format(sshd, GATE_CONFIG), 0o755)


def find_sshd() -> Optional[str]:
    return shutil.which("sshd", path="/usr/sbin:/sbin:/usr/bin")


def allowed(user: str) -> List[str]:
    """Return sshd's AllowUsers, AllowGroups and DenyUsers lines, which may reject the account's
    login.
    """
    sshd = find_sshd()
    if sshd is None:
        return []
    condition = "user={},host=localhost,addr=127.0.0.1".format(user)
    lines = run(sshd, "-T", "-C", condition, check=False).splitlines()
    return [
        line for line in lines if line.split(" ")[0] in ("allowusers", "allowgroups", "denyusers")
    ]


def leave(request: Dict[str, Any]) -> Dict[str, Any]:
    """Delete the account and CLAIM. If the account existed before, remove only its key and sudo
    rights.
    """
    claim = claimed()
    if claim.get("id", request["id"]) != request["id"]:
        # The machine belongs to another cluster now.
        return {"ok": True, "changed": False}
    user = request["user"]
    entry = account(user)
    if entry is not None and claim.get("account", False):
        end_processes(entry.pw_uid)
        run("userdel", "--remove", "--force", user)
        # systemd reports the account's units as failed, because their processes were killed.
        units = [
            "{}@{}.service".format(kind, entry.pw_uid) for kind in ("user", "user-runtime-dir")
        ]
        run("systemctl", "reset-failed", *units, check=False)
    elif entry is not None:
        file = Path(entry.pw_dir) / ".ssh/authorized_keys"
        with acting_as(entry):
            lines = (text_of(file) or "").splitlines()
            if request["key"] in lines:
                kept = "".join(line + "\n" for line in lines if line != request["key"])
                write(file, kept, 0o600, entry.pw_uid, entry.pw_gid)
    # The claim is removed last: until then the request can be repeated.
    for path in (SUDOERS, GATE, GATE_CONFIG, CLAIM):
        if path.exists():
            path.unlink()
    # The folder may contain other files.
    with suppress(OSError):
        CLAIM.parent.rmdir()
    remove_ansibles_files(Path(pwd.getpwuid(0).pw_dir) / ".ansible")
    return {"ok": True, "changed": True}


def remove_ansibles_files(folder: Path) -> None:
    """Remove the folders of modules that a killed `up` was running, and empty folders above."""
    for path in folder.glob("tmp/ansible_mitogen_runner_*"):
        shutil.rmtree(str(path), ignore_errors=True)
    for path in (folder / "tmp", folder):
        with suppress(OSError):
            path.rmdir()


def end_processes(uid: int) -> None:
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
    """Make other runs of this program wait. Only root may read the file ``path``: a reader could
    lock it. The last run removes it.
    """

    def late(*_: Any) -> None:
        cause = "another clusterctl is changing this account on the host"
        raise RefusedError("account", cause, "wait until it is finished, or kill that process")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(WAIT_S)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "r+", encoding="utf-8") as lock:
            os.fchmod(descriptor, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            # The run before may have removed the file.
            if not os.path.exists(path) or not os.path.samestat(
                os.fstat(descriptor), os.stat(path)
            ):
                continue
            signal.alarm(0)
            try:
                yield
            finally:
                os.unlink(path)
            return


def main() -> None:
    request = json.loads(sys.argv[1])
    os.environ["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
    os.environ["LC_ALL"] = "C"
    # All users read CLAIM, and sshd reads GATE_CONFIG, even if the host sets umask 077.
    os.umask(0o022)
    try:
        with alone():
            answer = {"join": join, "leave": leave}[request["do"]](request)
    except RefusedError as exc:
        answer = exc.answer
    except OSError as exc:
        answer = RefusedError("account", str(exc), "check that the host's disk is writable").answer
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
