"""The role users writes SSH keys into homes that a job may have prepared as a trap."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import re
import secrets
import shutil
import stat
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterctl.util.assets import data_folder
from tests.support.plays import run_play, run_tasks

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJm9W7vS0S3Gq3Z0b0m7mB4nJrj0v0E2m2u3Zr0vXq5d clusterctl"
OTHER = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHmk0n7vS0S3Gq3Z0b0m7mB4nJrj0v0E2m2u3Zr0vXq5e mine"
MARK = " managed by clusterctl for demo"
LISTED = "restrict,pty ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAAB ada" + MARK
FORMER = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHmk0n7vS0S3Gq3Z0b0m7mB4nJrj0v0E2m2u3Zr0vXq5f" + MARK


@pytest.fixture(autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One test at a time of all workers: the role looks at every account of the machine."""
    with (tmp_path_factory.getbasetemp().parent / "accounts.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder that other accounts can reach, unlike pytest's folders."""
    folder = Path("/var/tmp", f"clusterctl-test-{secrets.token_hex(4)}")
    folder.mkdir(mode=0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def ada(root: Path) -> Iterator[pwd.struct_passwd]:
    """An account of this machine, with a home."""
    name = f"t{secrets.token_hex(4)}"
    subprocess.run(["useradd", "-m", "-d", root / "home" / name, "-b", root, name], check=True)
    yield pwd.getpwnam(name)
    subprocess.run(["userdel", name], check=True)


@pytest.fixture
def etc(root: Path) -> Path:
    """A folder of root, such as /etc."""
    folder = root / "etc"
    folder.mkdir(mode=0o755)
    (folder / "authorized_keys").write_text("# root's\n")
    return folder


def accounts(ada: pwd.struct_passwd, keys: Sequence[str] = (KEY,)) -> list[dict[str, Any]]:
    return [{"name": ada.pw_name, "uid": ada.pw_uid, "ssh_authorized_keys": [*keys]}]


def play(
    tmp_path: Path,
    homes: Path,
    users: list[dict[str, Any]],
    role: str = "users",
    **more: object,
) -> str:
    """Run a role on a controller. Return Ansible's output. tmp_path: a folder that all may enter."""
    variables = {
        "ansible_become": True,
        "ansible_python_interpreter": "/usr/bin/python3",
        "users_home_root": str(homes),
        "users_accounts": users,
        "users_key_mark": MARK,
        "clusterctl_keeps": True,
        "users_record": str(tmp_path / "record.json"),
    }
    done = run_tasks(tmp_path, role, "configure", leads=True, **variables, **more)
    assert done.returncode == 0, done.stdout
    return done.stdout


def configure(
    tmp_path: Path,
    ada: pwd.struct_passwd,
    *,
    homes: Path | None = None,
    keys: Sequence[str] = (KEY,),
) -> str:
    return play(tmp_path, homes or Path(ada.pw_dir).parent, accounts(ada, keys))


def block(*lines: str, of: str = "") -> list[str]:
    """Return the lines of authorized_keys that the role writes for these lines."""
    return [f"# BEGIN{of}{MARK}", *lines, f"# END{of}{MARK}"]


@pytest.mark.parametrize(
    ("existing", "own", "longest"),
    [
        ([], False, ""),
        # An earlier `up` left login.defs's value.
        (["--key", "PASS_MAX_DAYS=60"], True, ""),
        (["--key", "PASS_MAX_DAYS=60"], False, "60"),
    ],
)
def test_created_account_without_a_password_never_expires(
    tmp_path: Path, existing: list[str], own: bool, longest: str
) -> None:
    """With PASS_MAX_DAYS of login.defs, sshd refuses keys after so many days: pam_unix(8). An
    account that the host had before is left as it is.
    """
    name = f"t{secrets.token_hex(4)}"
    uid = 50000 + secrets.randbelow(9999)
    if existing:
        home = ["--no-create-home", "--home-dir", str(tmp_path / name), "--uid", str(uid)]
        comment = ["--comment", "job user of clusterctl"] if own else []
        subprocess.run(["useradd", *existing, *home, *comment, "--user-group", name], check=True)
    variables = {
        "users_accounts": [{"name": name, "uid": uid, "ssh_authorized_keys": []}],
        "users_home_root": str(tmp_path),
        "users_makes_homes": False,
        "clusterctl_keeps": True,
    }
    done = run_tasks(tmp_path, "users", "configure", **variables)
    shadow = subprocess.run(["getent", "shadow", name], capture_output=True, text=True, check=False)
    subprocess.run(["userdel", name], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
    assert shadow.stdout.split(":")[1] == "!"
    assert shadow.stdout.split(":")[4] == longest


def owned(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return stat.S_IMODE(found.st_mode), found.st_uid


def converged(ada: pwd.struct_passwd) -> list[str]:
    """Return the lines of authorized_keys, after a check that sshd would accept the file."""
    folder = Path(ada.pw_dir, ".ssh")
    for path in (folder.resolve(), (folder / "authorized_keys").resolve()):
        mode, uid = owned(path)
        assert (mode & 0o022, uid) == (0, ada.pw_uid)
    return (folder / "authorized_keys").read_text().splitlines()


def as_user(ada: pwd.struct_passwd, command: str) -> None:
    ids = [f"--reuid={ada.pw_uid}", f"--regid={ada.pw_gid}", "--clear-groups"]
    subprocess.run(["setpriv", *ids, "sh", "-ec", command], check=True, cwd=ada.pw_dir)


@pytest.mark.parametrize(
    "spoil",
    [
        "ln -s {etc} .ssh",
        "touch .ssh",
        "mkfifo .ssh",
        "ln -s nowhere .ssh",
        "ln -s .ssh .ssh",
        "mkdir .ssh; chmod 0 .ssh",
        "mkdir .ssh; mkfifo .ssh/authorized_keys",
        "mkdir .ssh; ln -s /dev/zero .ssh/authorized_keys",
        "mkdir .ssh; ln -s /etc/shadow .ssh/authorized_keys",
        "mkdir -p .ssh/authorized_keys/full",
        "mkdir .ssh; truncate -s 1T .ssh/authorized_keys",
        "mkdir .ssh; ln -s authorized_keys .ssh/authorized_keys",
        "mkdir .ssh; echo mine >.ssh/authorized_keys; chmod 0 .ssh/authorized_keys",
    ],
)
def test_users_role_refuses_what_cannot_have_keys_and_moves_nothing(
    root: Path, ada: pwd.struct_passwd, etc: Path, spoil: str
) -> None:
    before = Path("/etc/shadow").stat()
    as_user(ada, spoil.format(etc=etc))
    theirs = tree(ada)
    with pytest.raises(AssertionError, match=f"chown {ada.pw_name}: PATH"):
        configure(root, ada)
    assert tree(ada) == theirs
    assert (owned(etc), [path.name for path in etc.iterdir()]) == ((0o755, 0), ["authorized_keys"])
    assert (etc / "authorized_keys").read_text() == "# root's\n"
    after = Path("/etc/shadow").stat()
    assert (after.st_uid, after.st_mode) == (before.st_uid, before.st_mode)


def tree(ada: pwd.struct_passwd) -> dict[Path, tuple[int, int]]:
    """Return the paths in a home, with the mode and owner of each, but without Ansible's own."""
    paths = Path(ada.pw_dir).rglob("*")
    return {path: owned(path) for path in paths if ".ansible" not in path.parts}


@pytest.mark.parametrize("prepare", ["mkdir -m 755 .ssh", "mkdir .dotfiles; ln -s .dotfiles .ssh"])
def test_users_role_replaces_only_its_own_keys(
    root: Path, ada: pwd.struct_passwd, prepare: str
) -> None:
    """A folder of the account's that is linked stays a link."""
    text = "\n".join(["# mine", *block(FORMER), OTHER])
    as_user(ada, f"{prepare}; cat >.ssh/authorized_keys <<'END'\n{text}\nEND")
    linked = Path(ada.pw_dir, ".ssh").is_symlink()
    configure(root, ada, keys=[KEY, LISTED])
    assert converged(ada) == ["# mine", *block(KEY, LISTED), OTHER]
    assert Path(ada.pw_dir, ".ssh").is_symlink() == linked


@pytest.mark.parametrize(
    ("modes", "then"), [("", "700 600"), ("755 640", "755 640"), ("775 664", "755 644")]
)
def test_users_role_takes_from_keys_only_rights_that_sshd_refuses(
    root: Path, ada: pwd.struct_passwd, modes: str, then: str
) -> None:
    paths = (".ssh", ".ssh/authorized_keys")
    for path, mode in zip(paths, modes.split(), strict=False):
        as_user(ada, f"{'touch' if '/' in path else 'mkdir'} {path}; chmod {mode} {path}")
    configure(root, ada)
    assert " ".join(f"{owned(Path(ada.pw_dir, path))[0]:o}" for path in paths) == then
    assert converged(ada) == block(KEY)


@pytest.mark.parametrize("has_keys", [False, True])
def test_users_role_writes_keys_through_a_link_of_the_account(
    root: Path, ada: pwd.struct_passwd, has_keys: bool
) -> None:
    keys = Path(ada.pw_dir, ".ssh/authorized_keys")
    more = f"echo '{OTHER}' >ak; chmod 600 ak" if has_keys else "echo >ak"
    as_user(ada, f"{more}; mkdir .ssh; ln -s ../ak .ssh/authorized_keys")
    configure(root, ada)
    assert keys.readlink() == Path("../ak")
    assert keys.read_text().split("\n")[:-1] == [OTHER if has_keys else "", *block(KEY)]
    assert "changed=0" in configure(root, ada)


@pytest.mark.parametrize("is_folder", [False, True])
def test_users_role_rejects_keys_of_root(
    root: Path, ada: pwd.struct_passwd, is_folder: bool
) -> None:
    folder = Path(ada.pw_dir, ".ssh")
    folder.mkdir(mode=0o755)
    if not is_folder:
        os.chown(folder, ada.pw_uid, ada.pw_gid)
    (folder / "authorized_keys").write_text(f"{OTHER}\n")
    with pytest.raises(AssertionError, match=f"chown {ada.pw_name}: PATH"):
        configure(root, ada)
    assert [path.name for path in folder.iterdir()] == ["authorized_keys"]
    assert (folder / "authorized_keys").read_text() == f"{OTHER}\n"


def record(root: Path, *names: str) -> None:
    """Write a host's record, by which the cluster has written keys of these accounts."""
    text = json.dumps({"keys": {name: [FORMER] for name in names}})
    (root / "record.json").write_text(text)


@pytest.mark.parametrize("is_created", [False, True])
@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_users_role_removes_keys_of_users_who_left_the_spec(
    root: Path, ada: pwd.struct_passwd, is_elsewhere: bool, is_created: bool
) -> None:
    """The record has an account that is gone."""
    homes = root / "shared" if is_elsewhere else Path(ada.pw_dir).parent
    text = "\n".join([OTHER, *block(FORMER)])
    as_user(ada, f"mkdir -m 700 .ssh; umask 077; echo '{text}' >.ssh/authorized_keys")
    if is_created:
        subprocess.run(["usermod", "-c", "job user of clusterctl", ada.pw_name], check=True)
    else:
        record(root, "nobody-has-this-name", ada.pw_name)
    for changed in ("changed=1", "changed=0"):
        assert changed in play(root, homes, [])
    assert converged(ada) == [OTHER]


@pytest.mark.parametrize("spoil", ["mkfifo .ssh", "mkdir .ssh; mkfifo .ssh/authorized_keys", ""])
def test_users_role_changes_no_home_of_a_former_user_without_its_keys(
    root: Path, ada: pwd.struct_passwd, spoil: str
) -> None:
    """The last one has no home, either."""
    if spoil:
        as_user(ada, spoil)
    else:
        shutil.rmtree(ada.pw_dir)
    before = sorted(Path(ada.pw_dir).rglob("*"))
    record(root, ada.pw_name)
    assert "changed=0" in play(root, Path(ada.pw_dir).parent, [])
    # Ansible itself makes a folder.
    now = sorted(path for path in Path(ada.pw_dir).rglob("*") if ".ansible" not in path.parts)
    assert now == before


def test_users_role_looks_into_no_home_of_other_accounts(
    root: Path, ada: pwd.struct_passwd
) -> None:
    """The shared folder of an institute has the homes of all its accounts."""
    folder = Path(ada.pw_dir, ".ssh")
    folder.mkdir(mode=0o755)
    text = "\n".join([OTHER, *block(FORMER)])
    (folder / "authorized_keys").write_text(text)
    before = owned(folder)
    assert "changed=0" in play(root, Path(ada.pw_dir).parent, [])
    assert (owned(folder), os.listdir(folder)) == (before, ["authorized_keys"])
    assert (folder / "authorized_keys").read_text() == text


@pytest.mark.parametrize(
    "theirs", ["mkdir clusterctl; touch clusterctl/mine", "mkdir src; ln -s src clusterctl", ":"]
)
def test_users_role_touches_only_keys_in_a_home_outside_shared_storage(
    root: Path, ada: pwd.struct_passwd, theirs: str
) -> None:
    """A folder ~/clusterctl may be a clone of this project."""
    shared = root / "shared"
    as_user(ada, theirs)
    before = tree(ada)
    configure(root, ada, homes=shared)
    folder = Path(ada.pw_dir, ".ssh")
    added = {path: tree(ada)[path] for path in (folder, folder / "authorized_keys")}
    assert tree(ada) == before | added
    assert converged(ada) == block(KEY)
    assert owned(shared / ada.pw_name / "clusterctl") == (0o700, ada.pw_uid)
    # Hosts that did not have the account have their home there.
    keys = shared / ada.pw_name / ".ssh/authorized_keys"
    assert keys.read_text().splitlines() == block(KEY)
    assert "changed=0" in configure(root, ada, homes=shared)


def test_users_role_makes_the_folder_of_jobs_on_hosts_without_shared_storage(
    root: Path, ada: pwd.struct_passwd
) -> None:
    """Each has it under the same path, whatever the home of an existing account is."""
    homes = root / "shared"
    play(root, homes, accounts(ada), users_homes_node_local=True)
    assert owned(homes / ada.pw_name / "clusterctl") == (0o700, ada.pw_uid)
    assert [*(homes / ada.pw_name).iterdir()] == [homes / ada.pw_name / "clusterctl"]
    assert converged(ada) == block(KEY)


def test_new_folders_of_users_are_those_that_the_role_creates(tmp_path: Path) -> None:
    """`down` removes them if they are empty."""
    file = data_folder("ansible") / "roles/users/meta/touches.yml"
    shown = {"ansible.builtin.debug": {"msg": "{{ users_touches.folders | join(' ') }}"}}
    play = {"hosts": "compute", "gather_facts": False, "vars_files": [str(file)], "tasks": [shown]}
    known = {"users_accounts": [{"name": "root"}], "users_home_root": "/s/home"}
    done = run_play(tmp_path, play, ("ctl", "node"), known=known)
    homes = ("/s/home/root", "/s/home/root/.ssh", "/s/home/root/clusterctl", "~root/.ssh")
    assert [path for path in homes if path not in re.split(r"[\s\"]+", done.stdout)] == []


def test_mpi_ssh_role_authorizes_a_key_of_the_account(root: Path, ada: pwd.struct_passwd) -> None:
    """The key stays; its options follow the cluster's hosts."""
    as_user(ada, f"mkdir -m 700 .ssh; umask 077; echo '{OTHER}' >.ssh/authorized_keys")
    folder = Path(ada.pw_dir, ".ssh")
    public = set()
    for addresses in (["10.0.0.1"], ["10.0.0.1", "10.0.0.2"]):
        hosts = [{"name": "a", "address": one, "port": 22, "key": KEY} for one in addresses]
        more = {"mpi_ssh_hosts": hosts, "mpi_ssh_folder": str(root / "mpi")}
        play(root, Path(ada.pw_dir).parent, accounts(ada), role="mpi_ssh", **more)
        public.add((folder / "clusterctl_mpi.pub").read_text().strip())
        line = f'restrict,from="{",".join(addresses)}" {(folder / "clusterctl_mpi.pub").read_text().strip()}'
        assert converged(ada) == [OTHER, *block(line, of=" mpirun,")]
    assert len(public) == 1
    pair = (folder / "clusterctl_mpi", folder / "clusterctl_mpi.pub")
    assert [owned(path) for path in pair] == [(0o600, ada.pw_uid), (0o644, ada.pw_uid)]


@pytest.mark.parametrize(
    "spoil",
    [
        "mkfifo clusterctl_mpi",
        "mkfifo clusterctl_mpi.pub",
        "mkdir clusterctl_mpi",
        "ln -s clusterctl_mpi clusterctl_mpi",
        "ln -s /etc/shadow clusterctl_mpi",
        "echo broken >clusterctl_mpi",
        "ssh-keygen -q -t ed25519 -N secret -f clusterctl_mpi",
        "ssh-keygen -q -t ed25519 -N '' -f clusterctl_mpi; chmod 0 clusterctl_mpi",
        "ssh-keygen -q -t ed25519 -N '' -f clusterctl_mpi; chmod 644 clusterctl_mpi",
        "touch clusterctl_mpi.pub; chmod 0 clusterctl_mpi.pub",
        "ssh-keygen -q -t ed25519 -N '' -f clusterctl_mpi; rm clusterctl_mpi.pub",
        "ssh-keygen -q -t ed25519 -N '' -f clusterctl_mpi; echo another >clusterctl_mpi.pub",
    ],
)
def test_mpi_ssh_role_replaces_what_is_no_key(
    root: Path, ada: pwd.struct_passwd, spoil: str
) -> None:
    as_user(ada, f"mkdir -m 700 .ssh; cd .ssh; {spoil}")
    more = {"mpi_ssh_hosts": [], "mpi_ssh_folder": str(root / "mpi")}
    for _ in range(2):
        output = play(root, Path(ada.pw_dir).parent, accounts(ada), role="mpi_ssh", **more)
    assert "changed=0" in output
    public = Path(ada.pw_dir, ".ssh/clusterctl_mpi.pub").read_text().strip()
    assert converged(ada) == block(f'restrict,from="" {public}', of=" mpirun,")


def test_mpi_ssh_role_reports_a_new_key_in_check_mode(root: Path, ada: pwd.struct_passwd) -> None:
    as_user(ada, "mkdir -m 700 .ssh")
    folder = root / "mpi"
    folder.mkdir()
    more = {"mpi_ssh_hosts": [], "mpi_ssh_folder": str(folder), "users_there": {ada.pw_name: {}}}
    more |= {"users_elsewhere": [ada.pw_name], "check": True}
    output = play(root, Path(ada.pw_dir).parent, accounts(ada), role="mpi_ssh", **more)
    # The files of the hosts' addresses, and the key.
    assert "changed=2" in output
    assert os.listdir(Path(ada.pw_dir, ".ssh")) == []


def test_mpi_ssh_role_authorizes_the_key_in_a_home_outside_shared_storage(
    root: Path, ada: pwd.struct_passwd
) -> None:
    shared = root / "shared"
    as_user(ada, "mkdir -m 700 .ssh")
    folder = shared / ada.pw_name / ".ssh"
    folder.mkdir(parents=True)
    for path in (folder.parent, folder):
        os.chown(path, ada.pw_uid, ada.pw_gid)
    more = {"mpi_ssh_hosts": [], "mpi_ssh_folder": str(root / "mpi")}
    more |= {"users_elsewhere": [ada.pw_name]}
    for _ in range(2):
        output = play(root, shared, accounts(ada), role="mpi_ssh", **more)
    assert "changed=0" in output
    public = (folder / "clusterctl_mpi.pub").read_text().strip()
    assert public.endswith(f" {ada.pw_name} on the hosts of this cluster (clusterctl)")
    assert converged(ada) == block(f'restrict,from="" {public}', of=" mpirun,")
