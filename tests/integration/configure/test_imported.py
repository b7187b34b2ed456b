"""An Ansible inventory becomes a spec of the same machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.configure.imported import spec_of_inventory
from clusterctl.errors import UsageError
from clusterctl.spec.load import parse_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers.onprem import OnpremSettings
from tests.support.messages import refused

LAB = """\
[head]
boss.lab.example ansible_host=10.0.0.10

[gpu_big]
gpu[01:02].lab.example ansible_port=2222

[gpu_small]
gpu03.lab.example ansible_host=10.0.0.13 ansible_user=root
gpu02.lab.example

[login]
door ansible_host=10.0.0.20

[nodes:children]
gpu_big
gpu_small

[all:vars]
ansible_user=rocky
ansible_ssh_private_key_file=~/.ssh/lab
ansible_ssh_common_args='-o ProxyCommand="ssh -W %h:%p -q me@gate.example.org"'
ansible_become_password=secret
"""


def imported(tmp_path: Path, text: str, name: str = "lab.ini") -> tuple[ClusterSpec, list[str]]:
    source = tmp_path / name
    source.write_text(text)
    spec, notes = spec_of_inventory(source)
    assert "secret" not in spec
    return parse_spec(spec, "x"), notes


def test_imported_groups_become_partitions(tmp_path: Path) -> None:
    spec, notes = imported(tmp_path, LAB)
    assert isinstance(spec.provider, OnpremSettings)
    assert (spec.name, spec.controller_host, spec.provider.login) == ("lab", "boss", ("door",))
    assert {p.name: p.hosts for p in spec.partitions} == {
        "gpu-big": "gpu[01-02]",
        "gpu-small": "gpu03",
    }
    machines = spec.provider.machines
    assert {name: (one.address, one.port, one.user) for name, one in machines.items()} == {
        "boss": ("10.0.0.10", 22, "rocky"),
        "gpu01": ("gpu01.lab.example", 2222, "rocky"),
        "gpu02": ("gpu02.lab.example", 2222, "rocky"),
        "gpu03": ("10.0.0.13", 22, "root"),
        "door": ("10.0.0.20", 22, "rocky"),
    }
    assert machines["gpu03"].become == "none"
    assert machines["gpu01"].key == str(Path("~/.ssh/lab").expanduser())
    assert any("gpu02.lab.example is already" in note for note in notes)
    assert any("-K" in note for note in notes)


def test_imported_inventory_without_groups_is_one_partition(tmp_path: Path) -> None:
    text = "all:\n  hosts:\n    one: {ansible_host: 10.0.0.1}\n    two: {ansible_host: 10.0.0.2}\n"
    spec, notes = imported(tmp_path, text, "hosts.yaml")
    assert spec.controller_host == "one"
    assert [(p.name, p.hosts) for p in spec.partitions] == [("train", "two")]
    assert "one is the" in notes[0]


def test_imported_hosts_have_notes_about_arguments_of_ssh(tmp_path: Path) -> None:
    arguments = "-C -oProxyJump=gate"
    text = f"[head]\nh\n[n]\nx ansible_ssh_common_args='{arguments}'\n"
    spec, notes = imported(tmp_path, text)
    assert spec.node_count == 1
    (said,) = (note for note in notes if note.startswith("x:"))
    assert arguments in said


def test_imported_arguments_of_ssh_may_be_of_any_type(tmp_path: Path) -> None:
    text = "all: {hosts: {one: {ansible_ssh_args: true, ansible_ssh_common_args: [-C]}, two: {}}}\n"
    _, notes = imported(tmp_path, text, "hosts.yaml")
    (said,) = (note for note in notes if note.startswith("one:"))
    assert "-C" in said


@pytest.mark.parametrize(
    ("text", "code", "word"),
    [
        ("[a\nx\n", "inventory-unreadable", "lab.ini"),
        ("[a]\n", "inventory-not-importable", "has no hosts"),
        ("[a]\nx.one\nx.two\n", "inventory-not-importable", "the same name: x"),
        ("w ansible_connection=winrm\n", "inventory-not-importable", "winrm"),
    ],
)
def test_unsuitable_inventory_is_one_error(text: str, code: str, word: str, tmp_path: Path) -> None:
    with refused(code, UsageError, word):
        imported(tmp_path, text)
    with refused("no-such-file", UsageError):
        spec_of_inventory(tmp_path / "none")


def test_hosts_without_ssh_are_left_out_and_notes_are_merged(tmp_path: Path) -> None:
    text = (
        "[controller]\nbox ansible_connection=community.docker.docker\n"
        "[gpu]\ngpu[01:03] ansible_become_password=secret\nwin1 ansible_connection=winrm\n"
        "[win]\nwin2 ansible_connection=winrm\n"
        "[ways]\na ansible_connection=ansible.builtin.ssh\nb ansible_connection=paramiko\n"
    )
    spec, notes = imported(tmp_path, text)
    assert isinstance(spec.provider, OnpremSettings)
    assert set(spec.provider.machines) == {"gpu01", "gpu02", "gpu03", "a", "b"}
    assert {p.name: p.hosts for p in spec.partitions} == {"gpu": "gpu[01-03]", "ways": "a,b"}
    assert notes == [
        "there is no group controller, so gpu01 is the controller",
        "box: is left out: ansible_connection is community.docker.docker, not ssh",
        "win[1-2]: is left out: ansible_connection is winrm, not ssh",
        "gpu[01-03]: passwords are not converted: SSH uses keys, -K asks for the sudo password",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[n]\na ansible_user='X Y'\nb\n",
            "provider.hosts.a.user: user must be a login name, not 'X Y'",
        ),
        (
            "[n]\na\nb\n[all:vars]\nansible_port=70000\n",
            "provider.access.port: port must be at most",
        ),
    ],
)
def test_settings_without_spec_key_get_a_note(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        imported(tmp_path, text)
    assert said in str(caught.value)
    assert "lab.ini:" not in str(caught.value)
    assert "lines" not in str(caught.value)
