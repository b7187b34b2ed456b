"""Files with secrets in the folder of a job: which are not sent, and how the user sends them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from clusterctl.errors import Notice, UsageError
from clusterctl.jobs import secret_files
from clusterctl.jobs.project import with_project
from clusterctl.jobs.secret_files import reject_own_keys, without_secrets
from clusterctl.jobs.source import source_of
from clusterctl.scheduler.request.request import Request
from clusterctl.spec.job import JobSpec
from clusterctl.spec.load import load_spec
from clusterctl.state.workspace import Workspace
from clusterctl.transport.tree import list_items
from tests.support.messages import condition, refused

ACCOUNT = {"type": "service_account", "project_id": "p", "private_key": "-"}


def pem(kind: str = "OPENSSH PRIVATE KEY", around: str = "-----") -> bytes:
    return f"{around}BEGIN {kind}{around}\nAAAA\n".encode()


SECRETS = {
    ".env": b"TOKEN=1\n",
    "sub/.env.local": b"TOKEN=1\n",
    ".netrc": b"x",
    ".git-credentials": b"x",
    ".pypirc": b"x",
    "web/.npmrc": b"x",
    "kaggle.json": b"{}",
    ".docker/config.json": b"{}",
    ".aws/credentials": b"x",
    ".ssh/known_hosts": b"x",
    "client.p12": b"x",
    "deep/down/deploy": pem(),
    "account.json": json.dumps(ACCOUNT, indent=2).encode(),
}
NAMED = {*SECRETS} - {".aws/credentials", ".ssh/known_hosts"} | {".aws/", ".ssh/"}
INNOCENT = {
    "tokenizer.json": b'{"type": "BPE"}',
    ".env.example": b"TOKEN=\n",
    "secrets.py": b"import os\n",
    "token_ids.npy": b"\x93NUMPY",
    "keys.txt": b"one\ntwo\n",
    "docs.md": b"A key begins so:\n" + pem(),
    "ca.pem": pem("CERTIFICATE"),
    "id_ed25519.pub": b"ssh-ed25519 AAAA\n",
    "config.json": b"{}",
    "empty": b"",
    "my.env": b"A=1\n",
}


@pytest.fixture(name="project")
def project_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path / "state"))
    folder = tmp_path / "project"
    write(folder, {"train.py": b"print(1)\n"})
    return folder


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def sent(project: Path, *include: str, script: str = "train.py") -> tuple[set[str], list[Notice]]:
    """Return the files that are sent, and the notes about secrets."""
    source = source_of(Request.read(JobSpec(name="j", script=project / script, include=include)))
    assert source is not None
    notes = [note for note in source.notes if isinstance(note, Notice)]
    found = [note for note in notes if condition(note) == "secrets-not-sent"]
    return {item.path for item in source.files} - {script}, found


def names_in(notes: list[Notice]) -> set[str]:
    (note,) = notes
    return {*note.split(": ", 1)[1].split("; ")[0].split(", ")}


def test_no_secret_is_sent_and_each_is_named_and_all_others_are_sent(project: Path) -> None:
    write(project, SECRETS | INNOCENT)
    files, notes = sent(project)
    assert files == {*INNOCENT}
    assert names_in(notes) == NAMED


def test_folder_without_secrets_has_no_note(project: Path) -> None:
    write(project, INNOCENT)
    assert sent(project) == ({*INNOCENT}, [])


@pytest.mark.parametrize("name", sorted(SECRETS))
def test_secret_is_sent_if_its_path_is_included(project: Path, name: str) -> None:
    write(project, SECRETS)
    files, notes = sent(project, f"/{name}")
    assert files == {name}
    assert name not in names_in(notes)


@pytest.mark.parametrize("pattern", ["*", "sub", "sub/", "**/.env.local", ".env.local"])
def test_pattern_and_folder_send_no_secret(project: Path, pattern: str) -> None:
    write(project, {"sub/.env.local": b"x", "sub/a": b"x"})
    files, notes = sent(project, pattern)
    assert files == {"sub/a"}
    assert names_in(notes) == {"sub/.env.local"}


def test_folder_of_secrets_is_sent_if_its_path_is_included(project: Path) -> None:
    write(project, {".ssh/config": b"x", ".ssh/sub/key": pem()})
    assert sent(project, ".ssh") == ({".ssh/config", ".ssh/sub/key"}, [])


@pytest.mark.parametrize(
    "content",
    [
        pem("RSA PRIVATE KEY"),
        pem("ENCRYPTED PRIVATE KEY"),
        pem("PGP PRIVATE KEY BLOCK"),
        pem().replace(b"\n", b"\r\n"),
        b"\r\n\r\n" + pem(),
        b"\xef\xbb\xbf" + pem(),
        pem().decode().encode("utf-16"),
        pem("EC PARAMETERS") + pem("EC PRIVATE KEY"),
        pem("CERTIFICATE") + pem("PRIVATE KEY"),
        b"Bag Attributes\n    localKeyID: 01\n" + pem("PRIVATE KEY"),
        pem("SSH2 ENCRYPTED PRIVATE KEY ", around="---- "),
        b"PuTTY-User-Key-File-3: ssh-ed25519\r\n",
        b"# created: 2026-01-01\n# public key: age1x\nAGE-SECRET-KEY-1X\n",
        json.dumps(dict(sorted(ACCOUNT.items()))).encode(),
        b'{"refresh_token": "x", "type": "authorized_user"}',
        # As openssl 3 writes them: RSA, EC, Ed25519, with a passphrase, PKCS#12.
        bytes.fromhex("308204a40201000282010100de90979535cbca92"),
        bytes.fromhex("30770201010420") + bytes(32) + bytes.fromhex("a00a06082a8648ce3d030107"),
        bytes.fromhex("302e020100300506032b657004220420"),
        bytes.fromhex("3081ec305706092a864886f70d01050d304a"),
        bytes.fromhex("308203fc020103308203b206092a864886f70d010701"),
    ],
)
def test_keys_are_known_by_their_first_bytes(project: Path, content: bytes) -> None:
    write(project, {"sub/x": content, "y": content + bytes(100_000)})
    files, notes = sent(project)
    assert files == set()
    assert names_in(notes) == {"sub/x", "y"}


@pytest.mark.parametrize(
    "content",
    [
        b"subject=CN\n" + pem("CERTIFICATE"),
        pem("PUBLIC KEY"),
        b"KEY = '''" + pem() + b"'''\n",
        b'{"type": "service_account"}',
        b'{"cell": "{\\"type\\": \\"service_account\\", \\"private_key\\": 1}"}',
        bytes.fromhex("3082016e30820113a00302010202144cf5fa6b"),
        bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d030107"),
        b" " * 70_000,
        b"-----BEGIN " + b"\n" * 70_000,
    ],
)
def test_files_that_only_resemble_keys_are_sent(project: Path, content: bytes) -> None:
    write(project, {"x": content})
    assert sent(project) == ({"x"}, [])


def test_secrets_behind_links_are_not_sent(project: Path, tmp_path: Path) -> None:
    """A link within the folder is sent as a link, and leads to nothing."""
    write(tmp_path, {"home/.netrc": b"x", "home/.aws/config": b"x", "home/key": pem()})
    write(project, {"sub/key": pem()})
    for name in (".netrc", ".aws/config", "key"):
        (project / f"link-{Path(name).name}").symlink_to(tmp_path / "home" / name)
    (project / "inside").symlink_to("sub/key")
    os.link(project / "sub" / "key", project / "hard")
    files, notes = sent(project)
    assert files == set()
    assert names_in(notes) == {"link-.netrc", "link-config", "link-key", "sub/key", "hard"}


def test_script_is_sent_also_from_a_folder_of_secrets(project: Path) -> None:
    write(project, {".azure/job.py": b"print(1)\n", ".azure/token": b"x"})
    job = JobSpec(name="j", script=project / ".azure" / "job.py", folder=project)
    source = source_of(Request.read(with_project(job, project)))
    assert source is not None
    assert {item.path for item in source.files} == {"train.py", ".azure/job.py"}


def test_unreadable_file_is_refused_and_unreadable_secret_is_not_read(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, {".env": b"x", "data": b"x"})
    opened = os.open

    def refuse(path: Path, *args: int) -> int:
        if Path(path).name in {".env", "data"}:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args)

    monkeypatch.setattr(os, "open", refuse)
    with refused("file-unreadable/here", UsageError, str(project / "data")):
        sent(project)
    (project / "data").unlink()
    files, notes = sent(project)
    assert files == set()
    assert names_in(notes) == {".env"}


def test_put_sends_the_secrets_whose_paths_are_given(project: Path) -> None:
    write(project, {"sub/.env": b"x", "sub/a": b"x", "key": pem(), ".ssh/config": b"x"})
    paths = [project / "sub", project / "key", project / ".ssh"]
    items, _ = list_items(paths)
    found, left_out = without_secrets(items, {path.name for path in paths})
    assert {item.path for item in found} == {"sub", "sub/a", "key", ".ssh", ".ssh/config"}
    assert left_out == ("sub/.env",)


SPEC = """\
version: 1
name: lab
provider:
  type: onprem
  controller: head
  hosts:
    head: {address: 192.0.2.10, key: keys/of-head}
    n1: {address: 192.0.2.11, key: of-n1}
  access: {user: anna, key: id_ed25519}
partitions:
  - {name: train, hosts: n1}
"""


@pytest.mark.parametrize("key", ["keys/of-head", "of-n1", "id_ed25519"])
@pytest.mark.parametrize("way", ["itself", "copy", "symbolic link", "hard link", "odd form"])
def test_key_that_the_spec_names_is_never_sent(
    project: Path, tmp_path: Path, key: str, way: str
) -> None:
    """Not even if it is included, or has a form that is not known."""
    content = pem() if way != "odd form" else b"a comment\n" + pem()
    home = project if way in {"itself", "odd form"} else tmp_path / "lab"
    write(home, {"cluster.yaml": SPEC.encode(), key: content})
    name = key
    if home != project:
        name = "other"
        match way:
            case "copy":
                write(project, {name: content})
            case "symbolic link":
                (project / name).symlink_to(home / key)
            case _:
                os.link(home / key, project / name)
    source = source_of(
        Request.read(JobSpec(name="j", script=project / "train.py", include=(f"/{name}",)))
    )
    assert source is not None
    spec = load_spec(home / "cluster.yaml")
    with refused("would-send-secret/key", UsageError, name, key):
        reject_own_keys(source.items, Workspace.of("lab"), spec)


def test_key_of_the_cluster_is_never_sent(project: Path) -> None:
    workspace = Workspace.of("lab")
    workspace.create()
    workspace.create_secrets()
    write(project, {"x": workspace.key.read_bytes()})
    source = source_of(Request.read(JobSpec(name="j", script=project / "train.py", include=("x",))))
    assert source is not None
    with refused("would-send-secret/key", UsageError, "x"):
        reject_own_keys(source.items, workspace)


def test_key_that_the_applied_spec_names_is_never_sent(project: Path, tmp_path: Path) -> None:
    workspace = Workspace.of("lab")
    workspace.create()
    workspace.spec.write_text(SPEC.replace("id_ed25519", str(tmp_path / "id_ed25519")))
    write(tmp_path, {"id_ed25519": pem()})
    write(project, {"x": pem()})
    source = source_of(Request.read(JobSpec(name="j", script=project / "train.py", include=("x",))))
    assert source is not None
    with refused("would-send-secret/key", UsageError, "x"):
        reject_own_keys(source.items, workspace)


def test_applied_spec_without_a_key_is_not_loaded(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To load it takes as long as the rest of `submit`. Each applied spec has `ssh_keys`."""
    workspace = Workspace.of("lab")
    workspace.create()
    workspace.spec.write_text("version: 1\nname: lab\nusers:\n  - {name: ada, ssh_keys: []}\n")
    monkeypatch.setattr(secret_files, "applied_if_known", lambda _: pytest.fail("it is loaded"))
    reject_own_keys((), workspace)
