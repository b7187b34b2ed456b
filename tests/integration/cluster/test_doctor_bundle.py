"""`doctor --bundle` collects records and logs, and contains no secret."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterctl.cluster import doctor_bundle
from clusterctl.cluster.doctor_bundle import DoctorBundle, create
from clusterctl.spec.load import parse_spec
from clusterctl.state.workspace import Workspace
from clusterctl.transport.openssh import ssh_config_text
from clusterctl.util.redact import HIDDEN
from tests.support.inventories import host_of, inventory_of
from tests.support.manual import ROOT, assert_shown
from tests.support.verbs import Clusterctl
from tests.unit.util.planted import FACTS, PLANTED, PORTS

SPEC = """\
version: 1
name: demo
provider: {type: onprem, controller: head, hosts: {head: 127.0.0.1}}
partitions: [{name: train, hosts: head}]
slurm: {extra: ["AccountingStoragePass=hunter2-of-slurm"]}
"""
MUNGE = bytes(range(1, 256)) * 4
FROM_ENVIRONMENT = "value-of-my-variable"
OF_GCLOUD = "of-the-login-of-gcloud"


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """The workspace of a cluster, with secrets in all places where they can occur."""
    found = Workspace(tmp_path / "demo")
    found.create()
    found.create_secrets()
    found.munge_key.write_bytes(MUNGE)
    found.spec.write_text(SPEC)
    roles = ("controller", "compute")
    host = host_of("head", address="127.0.0.1", port=9, roles=roles, distribution="debian-12")
    one = inventory_of(cluster="demo", provider="onprem", hosts=(host,), baked=False)
    found.inventory.write_text(one.text)
    found.ssh_config.write_text(ssh_config_text(one, found, found.key))
    text = "\n".join([*PLANTED.values(), FACTS, FROM_ENVIRONMENT, OF_GCLOUD, MUNGE.hex()])
    text += f"\n{base64.b64encode(MUNGE).decode()}\n{base64.encodebytes(MUNGE).decode()}"
    text += found.key.read_text()
    for path in (
        found.logs / "ansible-1.log",
        found.journal,
        found.root / "rendered" / "slurm.conf",
    ):
        path.write_text(text)
    found.terraform.mkdir()
    (found.terraform / "terraform.tfstate").write_text('{"state": "all in the clear"}')
    return found


def made(workspace: Workspace, folder: Path, doctor: Any = None) -> DoctorBundle:
    source = folder / "cluster.yaml"
    source.write_text(f"{SPEC}# {PLANTED['s3cr3t-of-the-index']}\n")
    spec = parse_spec(SPEC, "cluster.yaml")
    return create(spec, workspace, doctor or {"ok": True}, folder / "out.tar.gz", source=source)


def files(bundle: Path) -> Mapping[str, bytes]:
    with tarfile.open(bundle) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}  # type: ignore[union-attr]


def test_doctor_bundle_has_no_secret(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_REGISTRY_PASSWORD", FROM_ENVIRONMENT)
    monkeypatch.setenv("CLUSTERCTL_TOKEN", "tok-in-env-1")
    monkeypatch.setenv("HTTPS_PROXY", "http://ada:proxy-secret@proxy.lan:3128")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    login = {"type": "authorized_user", "refresh_token": OF_GCLOUD}
    (tmp_path / "application_default_credentials.json").write_text(json.dumps(login))
    body = workspace.key.read_text().splitlines()[2]
    found = files(made(workspace, tmp_path).file)
    secrets = [
        *PLANTED,
        FROM_ENVIRONMENT,
        OF_GCLOUD,
        "tok-in-env-1",
        "proxy-secret",
        "all in the clear",
    ]
    secrets += [body, MUNGE.hex()[:80], *base64.encodebytes(MUNGE).decode().split()]
    for name, raw in found.items():
        assert not [secret for secret in secrets if secret.encode() in raw], name
        assert MUNGE[:40] not in raw
    log = found["demo-doctor/workspace/logs/ansible-1.log"].decode()
    assert FACTS in log
    # What stands beside a secret.
    assert not [port for port in PORTS if str(port) not in log]
    assert "proxy.lan:3128" in found["demo-doctor/environment.txt"].decode()
    assert not [name for name in found if name.endswith(("id_ed25519", "munge.key", ".tfstate"))]


def test_doctor_bundle_is_written_if_a_key_has_an_unknown_home(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "~no-such-account/key.json")
    assert files(made(workspace, tmp_path).file)


def test_doctor_bundle_is_written_if_no_host_answers(workspace: Workspace, tmp_path: Path) -> None:
    bundle = made(workspace, tmp_path, {"ok": False, "error": "no connection: nobody is there"})
    found = files(bundle.file)
    assert [one.partition(":")[0] for one in bundle.missing] == ["doctor", "head"]
    readme = found["demo-doctor/README.txt"].decode()
    assert "nobody is there" in readme
    assert "attach the file" in readme
    for name in (
        "doctor.json",
        "versions.json",
        "spec.yaml",
        "workspace/journal.jsonl",
        "workspace/hosts.json",
    ):
        assert f"demo-doctor/{name}" in found
    assert json.loads(found["demo-doctor/versions.json"])["libraries"]["pydantic"]
    assert bundle.file.stat().st_mode & 0o777 == 0o600


def test_doctor_bundle_is_written_before_the_first_up(tmp_path: Path) -> None:
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    (cwd / "cluster.yaml").write_text(
        "version: 1\nname: demo\nprovider: {type: local}\npartitions: [{name: train, nodes: 1}]\n"
    )
    cli = Clusterctl(tmp_path / "home", cwd)
    said = cli("doctor", "--bundle", "mine.tar.gz").stdout
    assert "wrote mine.tar.gz" in said
    page = ROOT / "docs" / "howto" / "first-day-rocky.md"
    assert_shown(
        page,
        "clusterctl doctor --bundle",
        said,
        {"mine.tar.gz": "lab-doctor-20261124T101500.tar.gz"},
    )
    assert "missing: the records" in said
    assert "demo-doctor/spec.yaml" in files(cwd / "mine.tar.gz")
    assert "exists" in cli("doctor", "--bundle", "mine.tar.gz", rc=2).stderr
    answer = cli("-o", "json", "doctor", "--bundle").json
    assert Path(answer["bundle"]).parent == cwd
    assert not (tmp_path / "home" / "demo").exists()


def test_doctor_bundle_has_redacted_output_of_hosts(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Answer:
        stdout = "@@ journalctl -u slurmd\nslurmd started\nGITHUB_TOKEN=abcdefgh123\n"

    monkeypatch.setattr("clusterctl.transport.ssh.SSHTransport.run", lambda *_, **__: Answer)
    text = files(made(workspace, tmp_path).file)["demo-doctor/hosts/head.txt"].decode()
    assert "slurmd started" in text
    assert f"GITHUB_TOKEN={HIDDEN}" in text


def test_doctor_bundle_names_a_hung_command_and_has_the_rest(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that waits for a driver or for NFS can't even be killed: `timeout` does not come
    back.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    pid = tmp_path / "pid"
    for name, line in {
        "nvidia-smi": f'echo half of it; echo $$ >>"{pid}"; exec sleep 600',
        "scontrol": "exec sleep 600",
        "dpkg-query": "echo the last one",
        "timeout": "while :; do case $1 in -*) shift 2 ;; [0-9]*) shift ;; *) break ;; esac; done\n"
        '[ "$1" = nvidia-smi ] && exec "$@"\nexec /usr/bin/timeout 1 "$@"',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setattr(doctor_bundle, "COMMAND_S", 1)

    def on_host(_: object, argv: Sequence[str], *, stdin: bytes, timeout_s: float) -> Any:
        assert argv[:2] == ("sudo", "-n")
        done = subprocess.run(
            argv[2:], input=stdin, stdout=subprocess.PIPE, timeout=timeout_s, check=True
        )
        return SimpleNamespace(stdout=done.stdout.decode())

    monkeypatch.setattr("clusterctl.transport.ssh.SSHTransport.run", on_host)
    bundle = made(workspace, tmp_path)
    for one in pid.read_text().split():
        os.kill(int(one), signal.SIGKILL)
    text = files(bundle.file)["demo-doctor/hosts/head.txt"].decode()
    assert "@@ uname -a\nLinux" in text
    assert "half of it" in text
    assert "the last one" in text
    assert bundle.missing == tuple(
        f"head: {command}: no answer within 1 s"
        for command in ("scontrol show nodes", "nvidia-smi", "nvidia-smi topo -m")
    )
