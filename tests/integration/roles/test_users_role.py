"""The role users writes SSH keys into homes that a job may have prepared as a trap."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import ansible.module_utils
from clusterctl.util.assets import data_folder
from tests.support.plays import load_module, run_tasks

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJm9W7vS0S3Gq3Z0b0m7mB4nJrj0v0E2m2u3Zr0vXq5d clusterctl"
OTHER = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHmk0n7vS0S3Gq3Z0b0m7mB4nJrj0v0E2m2u3Zr0vXq5e mine"
MARK = " managed by clusterctl for demo"
LISTED = "restrict,pty ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAAB {{ name }}" + MARK
FORMER = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHmk0n7vS0S3Gq3Z0b0m7mB4nJrj0v0E2m2u3Zr0vXq5f" + MARK
Converge = Callable[..., dict[str, Any]]


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


def configure(tmp_path: Path, ada: pwd.struct_passwd, homes: Path) -> str:
    """Run the role."""
    account = {"name": ada.pw_name, "uid": ada.pw_uid, "ssh_authorized_keys": [KEY]}
    variables = {
        "users_home_root": str(homes),
        "users_accounts": [account],
        "clusterctl_keeps": True,
    }
    done = run_tasks(tmp_path, "users", "configure", leads=True, **variables)
    assert done.returncode == 0, done.stdout
    return done.stdout


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
        subprocess.run(["useradd", *existing, *home, "--user-group", name], check=True)
    variables = {
        "users_accounts": [{"name": name, "uid": uid, "ssh_authorized_keys": []}],
        "users_home_root": str(tmp_path),
        "users_makes_homes": False,
        "clusterctl_keeps": True,
        "clusterctl_recorded": {"accounts": [name] if own else []},
    }
    done = run_tasks(tmp_path, "users", "configure", **variables)
    shadow = subprocess.run(["getent", "shadow", name], capture_output=True, text=True, check=False)
    subprocess.run(["userdel", name], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
    assert shadow.stdout.split(":")[1] == "!"
    assert shadow.stdout.split(":")[4] == longest


@dataclass
class Module:
    """The part of AnsibleModule that the role's module uses."""

    params: dict[str, Any]
    tmpdir: str
    check_mode: bool = False
    warned: list[str] = field(default_factory=list)

    def warn(self, text: str) -> None:
        self.warned.append(text)

    def set_default_selinux_context(self, path: str, changed: bool) -> bool:
        assert os.lstat(path).st_uid == os.geteuid()
        return changed

    def run_command(self, argv: list[str], *, check_rc: bool) -> None:
        subprocess.run(argv, check=check_rc)


@pytest.fixture
def converge(
    tmp_path: Path, ada: pwd.struct_passwd, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Run the module in check mode, then for real, then again without a change."""
    paths = [*ansible.module_utils.__path__, str(data_folder("ansible") / "module_utils")]
    monkeypatch.setattr(ansible.module_utils, "__path__", paths)
    library = load_module("user_home")
    options = (
        "home authorized_keys key_options key_mark key_pair key_comment folder link target".split()
    )

    def act(**params: Any) -> dict[str, Any]:
        parameters = {**dict.fromkeys(options, ""), **params}
        before = sorted(Path(ada.pw_dir).rglob("*"))
        assert library.converge(Module(parameters, str(tmp_path), check_mode=True), ada)["changed"]
        assert sorted(Path(ada.pw_dir).rglob("*")) == before
        answer = dict(library.converge(Module(parameters, str(tmp_path)), ada))
        assert answer["changed"]
        assert library.converge(Module(parameters, str(tmp_path)), ada) == {
            **answer,
            "changed": False,
        }
        assert os.geteuid() == 0
        return answer

    return act


def owned(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return stat.S_IMODE(found.st_mode), found.st_uid


def converged(ada: pwd.struct_passwd) -> list[str]:
    """Return the lines of authorized_keys, after a check that sshd would accept the file."""
    folder = Path(ada.pw_dir, ".ssh")
    assert owned(folder.resolve()) == (0o700, ada.pw_uid)
    assert owned(folder / "authorized_keys") == (0o600, ada.pw_uid)
    return (folder / "authorized_keys").read_text().splitlines()


def as_user(ada: pwd.struct_passwd, command: str) -> None:
    ids = [f"--reuid={ada.pw_uid}", f"--regid={ada.pw_gid}", "--clear-groups"]
    subprocess.run(["setpriv", *ids, "sh", "-ec", command], check=True, cwd=ada.pw_dir)


def test_users_role_does_not_follow_a_link_in_place_of_the_ssh_folder(
    tmp_path: Path, ada: pwd.struct_passwd, etc: Path
) -> None:
    as_user(ada, f"ln -s {etc} .ssh")
    homes = Path(ada.pw_dir).parent
    configure(tmp_path, ada, homes)
    assert "changed=0" in configure(tmp_path, ada, homes)
    assert owned(etc) == (0o755, 0)
    assert [path.name for path in etc.iterdir()] == ["authorized_keys"]
    assert owned(etc / "authorized_keys") == (0o644, 0)
    assert (etc / "authorized_keys").read_text() == "# root's\n"
    assert converged(ada) == [KEY]
    assert Path(ada.pw_dir, ".ssh.aside-clusterctl").readlink() == etc


@pytest.mark.parametrize(
    "spoil",
    [
        "touch .ssh",
        "mkfifo .ssh",
        "mkdir .ssh; mkfifo .ssh/authorized_keys",
        "mkdir .ssh; ln -s /dev/zero .ssh/authorized_keys",
        "mkdir .ssh; ln -s /etc/shadow .ssh/authorized_keys",
        "mkdir -p .ssh/authorized_keys/full",
        "mkdir .ssh; truncate -s 1T .ssh/authorized_keys",
        "mkdir .ssh; chmod 0 .ssh",
        "ln -s nowhere .ssh",
    ],
)
def test_users_role_moves_other_files_at_the_path_of_authorized_keys_aside(
    converge: Converge, ada: pwd.struct_passwd, spoil: str
) -> None:
    before = Path("/etc/shadow").stat()
    as_user(ada, spoil)
    converge(authorized_keys=[KEY])
    assert converged(ada) == [KEY]
    after = Path("/etc/shadow").stat()
    assert (after.st_uid, after.st_mode) == (before.st_uid, before.st_mode)


@pytest.mark.parametrize(
    "prepare",
    ["mkdir .ssh", "mkdir -m 755 .ssh", "mkdir .dotfiles; ln -s .dotfiles .ssh"],
)
def test_users_role_keeps_other_keys_and_a_linked_ssh_folder(
    converge: Converge, ada: pwd.struct_passwd, prepare: str
) -> None:
    as_user(ada, f"{prepare}; printf '# mine\\n{OTHER}\\n' >.ssh/authorized_keys")
    linked = Path(ada.pw_dir, ".ssh").is_symlink()
    converge(authorized_keys=[KEY])
    assert converged(ada) == ["# mine", OTHER, KEY]
    assert Path(ada.pw_dir, ".ssh").is_symlink() == linked
    # Replaced in one step: sshd always finds a file, and no copies remain.
    assert [*Path(ada.pw_dir).rglob("*.aside-clusterctl*")] == []


def test_users_role_replaces_only_marked_key_lines(
    converge: Converge, ada: pwd.struct_passwd
) -> None:
    user_keys = [OTHER, LISTED.removesuffix(MARK)]
    text = "\n".join([FORMER, *user_keys])
    as_user(ada, f"mkdir .ssh; cat >.ssh/authorized_keys <<'END'\n{text}\nEND")
    converge(authorized_keys=[KEY, LISTED], key_mark=MARK)
    assert converged(ada) == [*user_keys, KEY, LISTED]
    converge(authorized_keys=[KEY], key_mark=MARK)
    assert converged(ada) == [*user_keys, KEY]


def test_users_role_removes_a_former_key(converge: Converge, ada: pwd.struct_passwd) -> None:
    as_user(ada, f"mkdir .ssh; echo '{FORMER}' >.ssh/authorized_keys")
    converge(key_mark=MARK)
    assert converged(ada) == []


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_users_role_removes_keys_of_users_who_left_the_spec(
    tmp_path: Path, ada: pwd.struct_passwd, root: Path, is_elsewhere: bool
) -> None:
    """The folder of homes has a folder without an account, as kept storage may."""
    homes = root / "shared" if is_elsewhere else Path(ada.pw_dir).parent
    for name in (ada.pw_name, "nobody-has-this-name"):
        (homes / name).mkdir(parents=True, exist_ok=True)
    as_user(ada, f"mkdir .ssh; printf '{OTHER}\n{FORMER}\n' >.ssh/authorized_keys")
    variables = {"users_home_root": str(homes), "users_accounts": [], "clusterctl_keeps": True}
    for changed in ("changed=1", "changed=0"):
        done = run_tasks(
            tmp_path, "users", "configure", leads=True, users_key_mark=MARK, **variables
        )
        assert done.returncode == 0, done.stdout
        assert changed in done.stdout
    assert converged(ada) == [OTHER]


def test_users_role_gives_root_owned_ssh_files_to_the_account(
    converge: Converge, ada: pwd.struct_passwd
) -> None:
    folder = Path(ada.pw_dir, ".ssh")
    folder.mkdir()
    (folder / "authorized_keys").write_text(f"{OTHER}\n")
    converge(authorized_keys=[KEY])
    assert converged(ada) == [OTHER, KEY]


def test_users_role_creates_the_shared_folder_of_a_home_outside_shared_storage(
    tmp_path: Path, ada: pwd.struct_passwd, root: Path, etc: Path
) -> None:
    shared = root / "shared"
    home = shared / ada.pw_name
    home.mkdir(parents=True)
    os.chown(home, ada.pw_uid, ada.pw_gid)
    (home / "clusterctl").symlink_to(etc)
    as_user(ada, "mkdir clusterctl; touch clusterctl/mine")
    configure(tmp_path, ada, shared)
    assert owned(etc) == (0o755, 0)
    assert owned(home / "clusterctl") == (0o700, ada.pw_uid)
    # Hosts that did not have the account have their home there.
    assert (home / ".ssh/authorized_keys").read_text() == f"{KEY}\n"
    assert Path(ada.pw_dir, "clusterctl").readlink() == home / "clusterctl"
    assert Path(ada.pw_dir, "clusterctl.aside-clusterctl/mine").exists()


def test_users_role_writes_no_key_pair_through_a_link(
    converge: Converge, ada: pwd.struct_passwd, etc: Path
) -> None:
    as_user(ada, f"mkdir .ssh; ln -s {etc}/authorized_keys .ssh/pair.pub; mkfifo .ssh/pair")
    public = converge(key_pair="pair", key_comment="ada's")["public_key"]
    assert owned(etc / "authorized_keys") == (0o644, 0)
    assert (etc / "authorized_keys").read_text() == "# root's\n"
    folder = Path(ada.pw_dir, ".ssh")
    assert (owned(folder / "pair"), owned(folder / "pair.pub")) == (
        (0o600, ada.pw_uid),
        (0o644, ada.pw_uid),
    )
    assert (folder / "pair.pub").read_text() == f"{public}\n"
    assert public.endswith(" ada's")
    converge(authorized_keys=[public], key_options="restrict")
    converge(authorized_keys=[public], key_options='restrict,from="10.0.0.1"')
    assert converged(ada) == [f'restrict,from="10.0.0.1" {public}']


def test_users_role_writes_keys_in_a_home_owned_by_root(
    converge: Converge, ada: pwd.struct_passwd
) -> None:
    os.chown(ada.pw_dir, 0, 0)
    Path(ada.pw_dir).chmod(0o755)
    converge(authorized_keys=[KEY])
    assert converged(ada) == [KEY]
