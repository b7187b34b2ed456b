"""`orphans`: clusters without a workspace are listed with their cost, and removed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from clusterctl.cli import down as cli_down
from clusterctl.cli.output import Screen
from clusterctl.errors import Failure, OnlyCopyError, ProvisionError, UsageError
from clusterctl.providers.base import Leftover, Orphan, OrphanSearch, Prompts
from clusterctl.spec.common import ProviderSettings
from clusterctl.spec.providers.gcp import GcpSettings
from clusterctl.util.progress import SILENT, Reporter
from tests.support.messages import condition, refused
from tests.support.providers import BareProvider, use_provider

DISK = Leftover("disk d-ctl in us-central1-a", 0.0125)
ORIGIN = "created by marta on laptop"
RULE = Leftover("firewall rule d-a1b2c3-ssh")


@dataclass
class Cloud(BareProvider):
    """A provider with two clusters `d`, one of which has a workspace."""

    clusters: dict[str, tuple[Leftover, ...]]
    destroyed: list[str] = field(default_factory=list)
    running: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()
    reporter: Reporter = SILENT

    def orphans(self, name: str) -> OrphanSearch:
        assert name == "d"
        found = tuple(Orphan(one, ORIGIN, self.running) for one in self.clusters)
        return OrphanSearch(found, self.failures)

    def leftovers(self, cluster_id: str, **_: object) -> tuple[Leftover, ...]:
        return self.clusters.get(cluster_id, ())

    def destroy(self, cluster_id: str, *, workspace: None) -> None:
        assert workspace is None
        self.reporter.progress(f"deleting {cluster_id}")
        self.destroyed.append(cluster_id)
        del self.clusters[cluster_id]


@pytest.fixture
def settings_used() -> list[ProviderSettings]:
    """The settings with which providers were made."""
    return []


@pytest.fixture
def cloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings_used: list[ProviderSettings]
) -> Cloud:
    cloud = Cloud({"a1b2c3": (DISK, RULE), "ffffff": (RULE,)})

    def provider_of(settings: ProviderSettings, prompts: Prompts) -> Cloud:
        settings_used.append(settings)
        cloud.reporter = prompts.reporter
        return cloud

    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path / "home"))
    use_provider(monkeypatch, provider_of)
    known = tmp_path / "home" / "d"
    known.mkdir(parents=True)
    (known / "id").write_text("ffffff\n")
    return cloud


def remove(
    *, yes: bool, discard: bool = True, project: str | None = "my-project", name: str = "d"
) -> None:
    screen = Screen(json=False, color=False, verbose=True)
    cli_down.orphans_remove(screen, name, project, yes=yes, discard=discard)


def test_orphans_remove_lists_cost_and_needs_confirmation(
    cloud: Cloud, settings_used: list[ProviderSettings], capfd: pytest.CaptureFixture[str]
) -> None:
    with refused("confirmation-needed", UsageError, "a1b2c3"):
        remove(yes=False)
    listed = capfd.readouterr().err
    assert f"a1b2c3, {ORIGIN}, 0.0125 USD" in listed
    assert "\n  disk d-ctl" in listed
    assert "ffffff" not in listed
    with refused("would-lose/files", OnlyCopyError):
        remove(yes=True, discard=False)
    assert cloud.destroyed == []
    remove(yes=True)
    assert cloud.destroyed == ["a1b2c3"]
    shown = capfd.readouterr()
    assert "destroy: deleting a1b2c3" in shown.err
    assert "cleanup verified" in shown.out
    remove(yes=False)
    assert "no orphans" in capfd.readouterr().out
    assert {
        settings.project for settings in settings_used if isinstance(settings, GcpSettings)
    } == {"my-project"}


def test_storage_left_by_a_removed_orphan_is_listed(
    cloud: Cloud, capfd: pytest.CaptureFixture[str]
) -> None:
    remove(yes=True, project=None)


def test_orphans_list_with_project_needs_another_option(cloud: Cloud) -> None:
    with refused("option-invalid/option-missing", UsageError):
        cli_down.orphans_list(Screen(json=False, color=False), project="my-project")
    assert cloud.destroyed == []


MACHINES = """
version: 1
name: d
provider: {type: onprem, controller: n1, hosts: {n1: 10.0.0.1, n2: 10.0.0.2}}
partitions: [{name: train, hosts: n2}]
"""


def test_orphan_on_own_machines_is_kept_without_discard_and_its_jobs_are_named(
    cloud: Cloud, tmp_path: Path
) -> None:
    spec = tmp_path / "cluster.yaml"
    spec.write_text(MACHINES)
    cloud.running = ("n1: slurmctld runs", "n1: job 7 (train) of hpc is RUNNING")
    screen = Screen(json=False, color=False, file=spec)
    with refused("in-use/orphan", OnlyCopyError, "a1b2c3", *cloud.running):
        cli_down.orphans_remove(screen, yes=True)
    assert cloud.destroyed == []
    cli_down.orphans_remove(screen, yes=True, discard=True)
    assert cloud.destroyed == ["a1b2c3"]


def test_host_that_cannot_be_searched_is_an_error(
    cloud: Cloud, capfd: pytest.CaptureFixture[str]
) -> None:
    cloud.failures = (Failure("host-key", "the host key differs", "n3"),)
    cloud.clusters.clear()
    screen = Screen(json=False, color=False)
    for verb in (cli_down.orphans_list, cli_down.orphans_remove):
        with refused("would-lose/hosts-not-searched", ProvisionError, "n3") as caught:
            verb(screen, "d", "my-project")
        assert [condition(failure) for failure in caught.value.failures] == ["host-key"]
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "that could be searched" in shown.err
