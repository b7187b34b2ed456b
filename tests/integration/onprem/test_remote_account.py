"""The program that creates the admin account on a host, as root."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from clusterctl.providers.onprem import remote_account


def test_let_in_does_not_follow_links_in_the_home(tmp_path: Path) -> None:
    shadow = tmp_path / "shadow"
    shadow.write_text("root")
    (tmp_path / ".authorized_keys.clusterctl").symlink_to(shadow)
    keys = tmp_path / "authorized_keys"
    assert remote_account.write(keys, "a key\n", 0o600, os.getuid(), os.getgid())
    assert (shadow.read_text(), keys.read_text(), keys.is_symlink()) == ("root", "a key\n", False)
    assert not remote_account.write(keys, "a key\n", 0o600, os.getuid(), os.getgid())


@pytest.mark.parametrize("made", ["pipe", "zeros"])
def test_let_in_does_not_wait_for_a_pipe(tmp_path: Path, made: str) -> None:
    keys = tmp_path / "authorized_keys"
    if made == "pipe":
        os.mkfifo(keys)
    else:
        keys.symlink_to("/dev/zero")
    assert remote_account.text_of(keys) is None
    assert remote_account.write(keys, "a key\n", 0o600, os.getuid(), os.getgid())
    assert keys.read_text() == "a key\n"


def test_let_in_writes_keys_with_the_rights_of_the_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its .ssh is a link to a folder of root."""
    home = Path(tempfile.mkdtemp(dir="/var/tmp"))
    roots = tmp_path / "roots"
    roots.mkdir()
    (home / ".ssh").symlink_to(roots)
    account = pwd.struct_passwd(("ada", "x", 54321, 54321, "", str(home), "/bin/sh"))
    os.chown(home, 54321, 54321)
    tmp_path.chmod(0o755)
    monkeypatch.setattr(remote_account.pwd, "getpwnam", lambda _: account)
    with pytest.raises((PermissionError, FileExistsError)):
        remote_account.let_in("ada", "ssh-ed25519 AAAA")
    assert list(roots.iterdir()) == []
    (home / ".ssh").unlink()
    assert remote_account.let_in("ada", "ssh-ed25519 AAAA")
    assert (home / ".ssh/authorized_keys").stat().st_uid == (home / ".ssh").stat().st_uid == 54321
    shutil.rmtree(home)


def test_everybody_can_read_the_claim_on_a_host_with_umask_077(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without Slurm, the folder also has the users' configuration of SSH."""
    claim = tmp_path / "clusterctl" / "cluster.json"
    request = {"do": "join", "id": "abc", "name": "demo", "host": "n1", "user": "root", "key": ""}
    monkeypatch.setattr(sys, "argv", ["remote_account.py", json.dumps(request)])
    for name in ("PATH", "LC_ALL"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(remote_account, "CLAIM", claim)
    monkeypatch.setattr(remote_account, "alone", nullcontext)
    for part, answer in {"let_in": False, "let_become_root": False, "allowed": []}.items():
        monkeypatch.setattr(remote_account, part, lambda *_, answer=answer: answer)
    monkeypatch.setattr(remote_account.shutil, "which", lambda *_: "/usr/sbin/visudo")
    umask = os.umask(0o077)
    try:
        remote_account.main()
    finally:
        os.umask(umask)
    assert json.loads(capsys.readouterr().out)["ok"]
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (claim.parent, claim)]
    assert modes == [0o755, 0o644]


@pytest.mark.parametrize("do", ["join", "leave"])
def test_host_with_an_empty_claim_is_not_changed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    do: str,
) -> None:
    claim = tmp_path / "cluster.json"
    claim.touch()
    request = {"do": do, "id": "abc", "name": "demo", "host": "n1", "user": "nobody", "key": ""}
    monkeypatch.setattr(sys, "argv", ["remote_account.py", json.dumps(request)])
    for name in ("PATH", "LC_ALL"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(remote_account, "CLAIM", claim)
    monkeypatch.setattr(remote_account, "alone", nullcontext)
    umask = os.umask(0o022)
    try:
        remote_account.main()
    finally:
        os.umask(umask)
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], answer["code"]) == (False, "claim-unreadable")
    assert claim.read_bytes() == b""


SUDO = """
mount --bind "$1" /etc/sudoers.d
"$2" -c 'from clusterctl.providers.onprem import remote_account as it; it.let_become_root("daemon", None)'
exec setpriv --reuid daemon --regid daemon --clear-groups sudo -n sh -c 'echo "$PATH"; id -u'
"""


def test_account_becomes_root_under_a_strict_sudoers(tmp_path: Path) -> None:
    """sudo is real, with a folder of the test in place of /etc/sudoers.d. Ansible's tasks need
    /usr/sbin, as for sysctl.
    """
    settings = tmp_path / "sudoers.d"
    settings.mkdir(mode=0o755)
    strict = settings / "00-hardened"
    strict.write_text('Defaults requiretty, use_pty, secure_path="/usr/bin:/bin"\n')
    strict.chmod(0o440)
    argv = ["unshare", "--mount", "sh", "-ec", SUDO, "sh", settings, sys.executable]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    path, uid = done.stdout.split()
    assert {"/usr/sbin", "/usr/bin"} <= {*path.split(":")}
    assert uid == "0"


def test_account_lock_is_private_to_root_and_waited_for(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch(mode=0o644)
    waiting = ["import clusterctl.providers.onprem.remote_account as it; it.WAIT_S = 1",
               f"with it.alone({str(lock)!r}): print('held')"]  # fmt: skip
    argv = [sys.executable, "-c", "\n".join(waiting)]
    with remote_account.alone(str(lock)):
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600
        said = subprocess.run(argv, check=False, capture_output=True, text=True).stderr
        assert "RefusedError: another clusterctl is changing" in said
    assert not lock.exists()
    assert subprocess.run(argv, check=False, capture_output=True).stdout == b"held\n"


def test_run_that_waited_for_a_lock_that_is_gone_takes_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run before removes the file while this one waits."""
    lock = tmp_path / "lock"
    flock = remote_account.fcntl.flock
    waits = iter([True, False])

    def removed(file: int, operation: int) -> None:
        flock(file, operation)
        if next(waits):
            lock.unlink()

    monkeypatch.setattr(remote_account.fcntl, "flock", removed)
    with remote_account.alone(str(lock)):
        assert lock.exists()
    assert not lock.exists()
    assert list(waits) == []


def test_leave_removes_what_a_killed_ansible_left(tmp_path: Path) -> None:
    root = tmp_path / ".ansible"
    for name in ("ansible_mitogen_runner_x", "ansible-tmp-of-another"):
        (root / "tmp" / name).mkdir(parents=True)
        (root / "tmp" / name / "module.py").touch()
    remote_account.remove_ansibles_files(root)
    assert [path.name for path in (root / "tmp").iterdir()] == ["ansible-tmp-of-another"]
    shutil.rmtree(root / "tmp/ansible-tmp-of-another")
    remote_account.remove_ansibles_files(root)
    assert not root.exists()


def test_create_account_uses_the_same_uid_unless_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test runs the real useradd on account files of another system."""
    run = remote_account.run
    table = tmp_path / "etc/passwd"

    def elsewhere(program: str, *argv: str, check: bool = True) -> str:
        return run(program, "--prefix", str(tmp_path), *argv, check=check)

    def account(name: str) -> list[str] | None:
        rows = (line.split(":") for line in table.read_text().splitlines())
        return next((row for row in rows if row[0] == name), None)

    monkeypatch.setattr(remote_account, "run", elsewhere)
    monkeypatch.setattr(remote_account, "account", account)
    (tmp_path / "etc").mkdir()
    shutil.copy("/etc/login.defs", tmp_path / "etc")
    for name in ("passwd", "group", "shadow", "gshadow"):
        (tmp_path / "etc" / name).touch()
    for user in ("clusterctl", "clusterctl2"):
        remote_account.make_account(user, 64100)
    first = account("clusterctl")
    second = account("clusterctl2")
    assert first is not None
    assert first[2:4] == ["64100", "64100"]
    assert first[5].startswith("/")
    assert second is not None
    assert int(second[2]) < 1000
