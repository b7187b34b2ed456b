"""Hosts of a cloud are asked once for their distribution, before anything is installed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from clusterctl.errors import (
    KeyRefusedError,
    ProvisionError,
    TransportError,
    TunnelError,
    TunnelRefusedError,
)
from clusterctl.hosts import probe
from clusterctl.hosts.probe import ProbeRequest, probe_hosts, with_distributions
from clusterctl.spec.distributions import UNSEEN
from clusterctl.state.inventory import CONTROLLER, Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Transport
from clusterctl.util.progress import SILENT, report_steps
from tests.support.inventories import host_of, inventory_of
from tests.support.messages import refused as rejected
from tests.support.scripted import ScriptedTransport, Step
from tests.unit.hosts.answers import SYSTEM, answer


def in_grace(error: TunnelError | TunnelRefusedError) -> TransportError:
    """Mark an error that is repeated for a minute on a new host."""
    error.has_grace = True
    return error


ASKED = ("sudo", "-n", "sh", "...")


def says(distribution: str) -> ScriptedTransport:
    """Return a host without Slurm, which answers with this distribution."""
    name, _, version = distribution.partition("-")
    system = SYSTEM | {"id": name, "version": version}
    return ScriptedTransport(
        [Step(ASKED, answer(said="@node\nabsent\n@gpus\n@mpi\n", system=system))]
    )


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    found = Workspace(tmp_path / "demo")
    found.create()
    return found


def hosts(*known: str) -> Inventory:
    """Return a controller and nodes with these distributions."""
    leader, *others = known
    controller = host_of("ctl", CONTROLLER, address="10.0.0.0", distribution=leader)
    nodes = (
        host_of(f"train-{n}", address=f"10.0.0.{n}", distribution=d)
        for n, d in enumerate(others, 1)
    )
    return inventory_of(hosts=(controller, *nodes), provider="gcp", baked=False)


def test_with_distributions_asks_only_new_hosts(workspace: Workspace) -> None:
    transports: dict[str, Transport] = {"train-1": says("rocky-9.6")}
    found = report_steps(
        with_distributions(hosts("rocky-9.5", UNSEEN), workspace, transports.__getitem__), SILENT
    )
    assert [host.distribution for host in found.hosts] == ["rocky-9.5", "rocky-9.6"]
    assert found.distribution.release == "rocky-9"
    assert "Host train-1" in workspace.ssh_config.read_text()
    assert report_steps(with_distributions(found, workspace, {}.__getitem__), SILENT) == found


@pytest.mark.parametrize(
    ("ctl", "node", "why"),
    [
        ("debian-12", "rocky-9.6", "train-1: the host has Rocky Linux 9, but ctl has Debian 12"),
        ("debian-12", "cos-121", "train-1: clusterctl can't configure cos-121"),
    ],
)
def test_with_distributions_names_an_unsuitable_host(
    workspace: Workspace, ctl: str, node: str, why: str
) -> None:
    transports: dict[str, Transport] = {"ctl": says(ctl), "train-1": says(node)}
    with rejected("host-unfit/distribution", ProvisionError, "train-1") as refused:
        report_steps(
            with_distributions(hosts(UNSEEN, UNSEEN), workspace, transports.__getitem__), SILENT
        )
    assert why in refused.value.why


def test_with_distributions_waits_for_the_account_of_a_cloud_host(
    workspace: Workspace, no_pause: None
) -> None:
    """Instances of Google publish host keys, and sshd answers, before the guest agent has created the
    account.
    """
    early = Step(ASKED, error=KeyRefusedError("it does not accept our key"))
    late = ScriptedTransport([early, *says("debian-12").left])
    found = report_steps(with_distributions(hosts(UNSEEN), workspace, lambda _: late), SILENT)
    assert found.hosts[0].distribution == "debian-12"
    refusing = ScriptedTransport([early])
    with pytest.raises(TransportError) as failed:
        report_steps(
            with_distributions(hosts(UNSEEN), workspace, lambda _: refusing, timeout_s=-1), SILENT
        )
    assert "OS Login" in failed.value.fix


def test_with_distributions_of_a_silent_host_shows_the_ssh_command(workspace: Workspace) -> None:
    silent = ScriptedTransport([Step(ASKED, error=TransportError("the key is refused"))])
    with pytest.raises(TransportError) as failed:
        report_steps(with_distributions(hosts(UNSEEN), workspace, lambda _: silent), SILENT)
    assert f"ssh -F {workspace.ssh_config} HOST" in failed.value.fix


@pytest.mark.parametrize(
    ("errors", "grace_s", "tries"),
    [
        ([in_grace(TunnelRefusedError("4033"))], 60.0, 2),
        ([in_grace(TunnelRefusedError("4033"))], -1.0, 1),
        ([in_grace(TunnelError("4003"))], 60.0, 2),
        ([in_grace(TunnelError("4003"))], -1.0, 1),
        ([TunnelError("the jump host does not reach it yet")], -1.0, 2),
        ([TunnelRefusedError("the login has expired", code="cloud-login/gcloud")], 60.0, 1),
        ([in_grace(TunnelRefusedError("4033")), KeyRefusedError("it has no account yet")], 60.0, 3),
    ],
)
def test_refused_tunnel_of_a_new_host_has_a_minute(
    *,
    errors: list[TransportError],
    grace_s: float,
    tries: int,
    workspace: Workspace,
    no_pause: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "_GRACE_S", grace_s)
    late = ScriptedTransport(
        [*(Step(ASKED, error=error) for error in errors), *says("debian-12").left]
    )
    before = len(late.left)
    with suppress(TransportError):
        report_steps(with_distributions(hosts(UNSEEN), workspace, lambda _: late), SILENT)
    assert before - len(late.left) == tries


def test_refused_tunnel_of_a_known_host_fails_at_once(no_pause: None) -> None:
    """IAP's codes 4047 and 4003 are waited for, because `up` starts a host that is off."""
    refusing = ScriptedTransport(
        [Step(ASKED, error=in_grace(TunnelRefusedError("4033"))), *says("debian-12").left]
    )
    with rejected("unreachable/hosts", TransportError):
        probe_hosts({"ctl": ProbeRequest()}, lambda _: refusing)
    assert len(refusing.calls) == 1
    starting = ScriptedTransport(
        [Step(ASKED, error=in_grace(TunnelError("4003"))), *says("debian-12").left]
    )
    assert (
        probe_hosts({"ctl": ProbeRequest()}, lambda _: starting)["ctl"].distribution == "debian-12"
    )


def test_broken_tunnel_of_all_hosts_is_explained_once(workspace: Workspace) -> None:
    """The error has the cause and the fix of the tunnel, and no advice to try each host."""
    error = TunnelRefusedError(
        "no tunnel", code="cloud-login/gcloud", why="it has expired", fix="gcloud auth login"
    )
    refusing = {name: ScriptedTransport([Step(ASKED, error=error)]) for name in ("ctl", "train-1")}
    with rejected("cloud-login/gcloud", TransportError, why=error.why, fix=error.fix) as caught:
        report_steps(
            with_distributions(hosts(UNSEEN, UNSEEN), workspace, refusing.__getitem__), SILENT
        )
    assert str(caught.value).count(error.why) == 1
    assert {failure.host for failure in caught.value.failures} == set(refusing)


@pytest.mark.parametrize(
    "failing", [("ctl",), ("train-1", "train-2"), ("ctl", "train-1", "train-2")]
)
def test_refusal_names_hosts_unless_the_tunnel_of_all_is_broken(
    failing: tuple[str, ...], no_pause: None
) -> None:
    error = TunnelError(
        "no connection", code="unreachable/jump-host", why="it is down", fix="start it"
    )
    names = ("ctl", "train-1", "train-2") if len(failing) > 1 else failing
    transports = {
        name: ScriptedTransport([Step(ASKED, error=error)])
        if name in failing
        else says("debian-12")
        for name in names
    }
    with rejected("unreachable/hosts", TransportError, fix=error.fix) as caught:
        probe_hosts(dict.fromkeys(names, ProbeRequest()), transports.__getitem__, timeout_s=-1)
    named = {name for name in names if name in caught.value.why}
    assert named == (set() if len(failing) == 3 else set(failing))
