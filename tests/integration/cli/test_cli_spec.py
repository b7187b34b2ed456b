"""Specs before anything is made or asked, and the table of doctor."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.cli.output import Screen
from clusterctl.cli.phases import prompts_for
from clusterctl.cli.plan import report_lines
from clusterctl.errors import UsageError
from clusterctl.hosts.checks import DoctorReport
from clusterctl.hosts.probe import HostFacts
from clusterctl.providers.base import OfferedKey, fingerprint
from tests.support.messages import codes, refused
from tests.support.verbs import Clusterctl
from tests.unit.hosts.test_doctor import WELL

MANUAL = Path(__file__).parents[3] / "docs" / "howto" / "first-day-gcp.md"
SPEC = """\
version: 1
name: lab
provider:
  type: onprem
  controller: head
  access: {user: rocky, key: /nowhere/key}
  hosts:
    head: 192.0.2.1
    gpu01: {address: 192.0.2.2, key: keys/half}
    gpu02: {address: 192.0.2.3, key: keys/none}
partitions: [{name: train, hosts: "gpu[01-02]"}]
"""


@pytest.mark.parametrize("verb", ["doctor", "plan", "up --yes"])
def test_missing_private_key_is_an_error_of_the_spec(verb: str, cli: Clusterctl) -> None:
    (cli.cwd / "cluster.yaml").write_text(SPEC)
    (cli.cwd / "keys").mkdir()
    (cli.cwd / "keys/half.pub").touch()  # its other half may be in an agent
    result = cli("-o", "json", *verb.split(), rc=2)
    assert codes(result) == ["not-found/key-file"]
    for part in ("/nowhere/key", f"{cli.cwd}/keys/none", "(head, gpu02)", "fix: correct `key`"):
        assert part in result.stderr
    assert "keys/half" not in result.stderr


def test_host_keys_shown_before_confirmation_with_json(capsys):
    offered = OfferedKey("n1", "10.0.0.1", "ssh-ed25519 AAAA")
    confirm = prompts_for(Screen(json=True, color=False)).confirm
    with refused("host-key/unconfirmed", UsageError):
        confirm([offered])
    assert fingerprint("ssh-ed25519 AAAA") in capsys.readouterr().err


def test_machine_types_of_a_spec_are_shown(cli: Clusterctl) -> None:
    cli("init", "--provider", "gcp")
    shown = cli("validate").stdout
    assert shown == (
        "valid: cluster 'demo', provider gcp, 2 nodes\n"
        "  the controller: e2-standard-4\n"
        "  train: 2 x g2-standard-4 with 1 x l4\n"
    )
    assert shown in MANUAL.read_text()
    assert cli("validate", "-o", "json").json["machine_types"] == {"train": "g2-standard-4"}


@pytest.mark.parametrize(("provider", "verb"), [("local", "up"), ("existing", "attach")])
def test_init_names_the_next_command(cli: Clusterctl, provider: str, verb: str) -> None:
    assert f"run `clusterctl {verb}`" in cli("init", "--provider", provider).stdout


@pytest.mark.parametrize("provider", ["local", "gcp", "onprem"])
def test_name_of_a_new_spec_replaces_the_usual_name(cli: Clusterctl, provider: str) -> None:
    cli("init", "--provider", provider, "--name", "lab")
    text = (cli.cwd / "cluster.yaml").read_text()
    assert "\nname: lab\n" in text
    assert "demo" not in text
    assert codes(cli("-o", "json", "init", "--force", "--name", "My lab", rc=2)) == [
        "option-invalid/cluster-name"
    ]
    assert codes(cli("-o", "json", "init", "--examples", "--name", "lab", rc=2)) == [
        "options-exclusive"
    ]
    assert (cli.cwd / "cluster.yaml").read_text() == text


def test_skill_for_agents_is_written_where_they_look(cli: Clusterctl) -> None:
    shown = cli("init", "--agent", "-o", "json").json
    folder = cli.cwd / ".agents" / "skills" / "clusterctl"
    linked = cli.cwd / ".claude" / "skills" / "clusterctl"
    assert shown["files"] == ["SKILL.md"]
    assert (linked / "SKILL.md").samefile(folder / "SKILL.md")
    assert codes(cli("init", "--agent", "-o", "json", rc=2)) == ["exists/file"]
    (folder / "SKILL.md").write_text("changed")
    cli("init", "--agent", "--force")
    assert (folder / "SKILL.md").read_text().startswith("---\nname: clusterctl\n")
    assert codes(cli("init", "--agent", "--examples", "-o", "json", rc=2)) == ["options-exclusive"]
    assert codes(cli("init", "--agent", "--name", "x", "-o", "json", rc=2)) == ["options-exclusive"]


def test_folder_of_another_skill_is_not_replaced(cli: Clusterctl) -> None:
    other = cli.cwd / ".claude" / "skills" / "clusterctl"
    other.mkdir(parents=True)
    (other / "SKILL.md").write_text("mine")
    for force in ([], ["--force"]):
        shown = cli("init", "--agent", *force, "-o", "json", rc=2)
        assert codes(shown) == ["exists/file"]
        # It would not help.
        assert "--force" not in shown.json["failures"][0]["fix"]
    assert (other / "SKILL.md").read_text() == "mine"
    assert not (cli.cwd / ".agents").exists()
    other.rename(other.with_name("mine"))
    cli("init", "--agent")
    assert (other / "SKILL.md").is_file()


@pytest.mark.parametrize(
    ("gpus", "shown"),
    [
        ({"cards": 2, "shown": ["T4", "T4"], "driver": "580.95.05"}, "T4, T4 (driver 580.95.05)"),
        ({"cards": 2}, "2 without driver"),
    ],
)
def test_host_is_shown_with_its_gpus_and_their_driver(gpus: dict[str, object], shown: str) -> None:
    facts = HostFacts.model_validate(WELL | {"gpus": {**WELL["gpus"], **gpus}})
    table = report_lines(Screen(json=False, color=False), DoctorReport((), {"one": facts}))
    assert f"15.6 GiB  {shown}  enforcing" in "\n".join(table)
