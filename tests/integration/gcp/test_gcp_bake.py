"""The node image at Google: built once on a machine of its own, and used by nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cluster import bake
from clusterctl.cluster.bake import bake_image
from clusterctl.cluster.context import ClusterContext
from clusterctl.configure.inventory_file import install_mark
from clusterctl.errors import ClusterctlError, StalePlanError, UsageError
from clusterctl.providers.base import HostOptions, HostPlan, Provisioned
from clusterctl.providers.gcp.images import image_machines, images_of
from clusterctl.providers.gcp.provider import GcpProvider
from clusterctl.providers.templates import NodeTemplates
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers.gcp import image_error
from clusterctl.state.inventory import COMPUTE, Inventory
from clusterctl.state.workspace import Workspace
from tests.support.google import gcloud
from tests.support.google.api import PROJECT, Google
from tests.support.google.cloud import GoogleCloud
from tests.support.messages import condition, refused
from tests.support.terraform import RecordingReporter
from tests.unit.gcp import recorded
from tests.unit.gcp.clusters import (
    NOT_BILLED,
    OWN_NETWORK,
    provider_of,
    put_own_network,
    workspace_in,
)

pytestmark = pytest.mark.platform("stand-in", "google-image")

NODES = ["demo-train-1", "demo-train-2"]
MACHINE = "demo-image"
INPUTS = "0123456789abcdef"


def no_packages() -> ClusterctlError:
    return ClusterctlError("no packages", code="no-packages", fix="look at the mirror")


def spec_of(
    nodes: int = 2, *, software: dict[str, Any] | None = None, **settings: Any
) -> ClusterSpec:
    known = {"type": "gcp", "project": PROJECT, "zone": "us-central1-a", "image": {"bake": True}}
    train = {"name": "train", "nodes": nodes, "gpus": {"type": "l4", "count": 1}}
    text = {"version": 1, "name": "demo", "provider": known | settings, "partitions": [train]}
    return ClusterSpec.model_validate(text | {"software": software or {}})


@dataclass
class Baked:
    """A cloud in which `up` builds node images. seen: the machines on which images were built."""

    cloud: GoogleCloud
    google: Google
    workspace: Workspace
    seen: list[Inventory] = field(default_factory=list)
    reporter: RecordingReporter = field(default_factory=RecordingReporter)
    fails: BaseException | None = None

    def bake(self, image: Inventory) -> None:
        """Bake a machine, which runs meanwhile."""
        self.seen.append(image)
        assert image.compute[0].name in self.cloud.instances
        if self.fails:
            raise self.fails

    def planned(self, provider: GcpProvider, spec: ClusterSpec, inputs: str = INPUTS) -> HostPlan:
        return provider.plan(spec, self.workspace, HostOptions(inputs=inputs))

    def up(self, spec: ClusterSpec, inputs: str = INPUTS) -> Provisioned:
        """Plan, bake the class of new nodes, and create the hosts, as `up` does."""
        provider = provider_of(spec, self.reporter)
        self.planned(provider, spec, inputs)
        return self.up_from(provider, spec, inputs)

    def up_from(
        self, provider: GcpProvider, spec: ClusterSpec, inputs: str = INPUTS
    ) -> Provisioned:
        templates = NodeTemplates({COMPUTE: self.prepare(provider, spec, inputs)}, lambda _: {})
        return provider.apply(spec, self.workspace, HostOptions(templates=templates))

    def prepare(self, provider: GcpProvider, spec: ClusterSpec, inputs: str = INPUTS) -> str:
        """Have the image of new nodes made; return the key of their class."""
        shared = provider.prepare_templates(spec, self.workspace, {COMPUTE: inputs}, bake=self.bake)
        return shared[COMPUTE]

    @property
    def images(self) -> dict[str, dict[str, Any]]:
        rows = self.cloud.resources("google_compute_image")
        return {row["name"]: row for row in rows.values()}

    def image_under(self, host: str) -> str:
        (disk,) = self.cloud.instances[host]["boot_disk"]
        return str(disk["initialize_params"][0]["image"]).rpartition("/")[2]


@pytest.fixture
def baked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Baked]:
    with recorded.cloud_in(tmp_path, monkeypatch, is_real=False) as (cloud, google):
        yield Baked(cloud, google, workspace_in(tmp_path / "home"))


@pytest.fixture
def raised(baked: Baked) -> Baked:
    """A cloud with a running cluster."""
    baked.up(spec_of())
    return baked


LEAN = {"network": OWN_NETWORK, "enable_apis": False}


def test_terraform_makes_the_machine_and_nodes_of_its_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another configuration is another image, and replaces no node."""
    with recorded.cloud_in(tmp_path, monkeypatch, is_real=True) as (cloud, google):
        put_own_network(cloud)
        baked = Baked(cloud, google, workspace_in(tmp_path / "home"))
        spec = spec_of(1, **LEAN)
        (first,) = {
            image.name for image in images_of(provider_of(spec)._api, spec, INPUTS).values()
        }
        image = f"projects/{PROJECT}/global/images/{first}"
        ready = {"status": "READY", "size": "50", "family": "x", "labels": {}}
        google.world.put("google_compute_image", image, **ready)  # as another cluster left it
        baked.up(spec)
        assert sorted(cloud.instances) == ["demo-ctl", "demo-train-1"]
        assert baked.image_under("demo-train-1") == first
        assert baked.image_under("demo-ctl").startswith("rocky-linux-9-optimized-gcp")
        cloud.forget_log()
        baked.up(spec_of(**LEAN), inputs="fedcba9876543210")
        (second,) = set(baked.images) - {first}
        assert [baked.image_under(node) for node in NODES] == [first, second]
        done = [(op, name) for op, kind, name in cloud.done() if kind == "google_compute_instance"]
        assert done == [("create", MACHINE), ("delete", MACHINE), ("create", NODES[1])]


def test_bake_installs_the_image_like_a_node(baked: Baked) -> None:
    provider = provider_of(spec_of())
    (note,) = [
        note for note in baked.planned(provider, spec_of()).notes if "builds the node" in note
    ]
    assert "on demo-image (e2-standard-2, 0.067 USD" in note
    assert not baked.cloud.instances
    done = baked.up_from(provider, spec_of())
    ((name, image),) = baked.images.items()
    assert image["status"] == "READY"
    assert image["labels"] == {"clusterctl-image": name.removeprefix("clusterctl-")}
    assert image["family"] == "clusterctl-rocky-linux-9-optimized-gcp-nvidia-580"
    assert list(done.made) == ["demo-ctl", *NODES]
    (machine,) = baked.seen
    assert not machine.baked
    assert [host.roles for host in machine.hosts] == [("controller",), ("compute",)]
    assert machine.shared_folder.kind == done.inventory.shared_folder.kind
    real = replace(done.inventory, scheduler=spec_of().scheduler)
    assert install_mark(machine, spec_of().software) == install_mark(real, spec_of().software)

    more = provider_of(spec_of(3))
    assert not [note for note in baked.planned(more, spec_of(3)).notes if "builds the node" in note]
    baked.up_from(more, spec_of(3))
    # A node more is of the same class.
    assert len(baked.seen) == 1
    assert baked.image_under("demo-train-3") == name


def test_missing_image_family_blocks_only_new_nodes(raised: Baked) -> None:
    """Google answers 404 for a retired image family."""
    raised.google.project.has["images/family/rocky-linux-9-optimized-gcp-nvidia-580"] = None
    provider = provider_of(spec_of())
    planned = raised.planned(provider, spec_of())
    assert not planned.changes
    (note,) = [note for note in planned.notes if "no longer has" in note]
    assert "another provider.partitions.train.image" in note
    with refused("unsupported/image", ClusterctlError, why=note):
        raised.prepare(provider, spec_of())
    assert not [
        note
        for note in raised.planned(provider_of(spec_of()), spec_of(), "").notes
        if "no longer" in note
    ]


def test_plan_builds_the_image_on_a_gpu_machine_if_a_driver_is_installed(baked: Baked) -> None:
    plain = {"project": "rocky-linux-cloud", "family": "rocky-linux-9-optimized-gcp"}
    spec = spec_of(
        software={"nvidia": {"driver": "open"}},
        partitions={"train": {"image": plain, "spot": True}},
    )
    (note,) = [
        note for note in baked.planned(provider_of(spec), spec).notes if "builds the node" in note
    ]
    assert "demo-image (g2-standard-4" in note


@pytest.mark.parametrize(("nodes", "builder_s"), [("10m", 2 * 3600), ("2d", 2 * 86400)])
def test_flex_start_leaves_time_to_build_the_image(nodes: str, builder_s: int) -> None:
    settings = {"partitions": {"train": {"flex_start": nodes}}}
    (group,) = image_machines(spec_of(software={"nvidia": {"driver": "open"}}, **settings))
    assert group.nodes.flex_start == builder_s


@pytest.mark.parametrize(
    ("method", "code"),
    [
        ("compute.images.insert", "cloud-permission"),
        ("", "no-packages"),
    ],
)
def test_failed_image_build_leaves_no_machine(baked: Baked, method: str, code: str) -> None:
    """Either Google or the build on the machine fails."""
    if method:
        baked.google.fail(
            method, 403, reason="forbidden", message=f"Required '{method}' permission"
        )
    else:
        baked.fails = no_packages()
    with refused(code):
        baked.up(spec_of())
    assert not baked.cloud.instances
    assert not baked.images
    assert any("deleting demo-image" in line for line in baked.reporter.lines)
    baked.fails = None
    baked.up(spec_of())
    (name,) = baked.images
    assert {baked.image_under(node) for node in NODES} == {name}


@pytest.mark.parametrize("is_baked", [False, True])
def test_build_machine_that_can_not_be_removed_is_reported(baked: Baked, is_baked: bool) -> None:
    """Such as if the login at Google expires during the build."""
    baked.fails = None if is_baked else no_packages()
    baked.cloud.fail("quota_of_region", name=MACHINE, on="delete")
    with refused("leftovers/machine", ClusterctlError, "`clusterctl up`") as caught:
        baked.up(spec_of())
    assert MACHINE in baked.cloud.instances
    *before, left = caught.value.failures
    assert (left.host, condition(left)) == (MACHINE, "leftovers/machine")
    assert left.cause in caught.value.fix
    assert before
    assert "billed" not in "".join(one.fix for one in before)
    assert is_baked or caught.value.fix.startswith(f"{no_packages().fix}\n")


def test_failed_image_is_built_again(baked: Baked) -> None:
    # the machine stops; the image fails
    baked.google.failing += [{}, {"code": "RESOURCE_EXHAUSTED", "message": "played"}]
    with refused("cloud-refused", ClusterctlError, "RESOURCE_EXHAUSTED"):
        baked.up(spec_of())
    (name,) = baked.images
    baked.google.world.put(
        "google_compute_image",
        f"projects/{PROJECT}/global/images/{name}",
        **{**baked.images[name], "status": "FAILED"},
    )
    baked.up(spec_of())
    assert list(baked.images) == [name]
    assert baked.images[name]["status"] == "READY"
    assert len(baked.seen) == 2


class KilledError(BaseException):
    """A kill, after which nothing is cleaned up."""


def killed(baked: Baked) -> GcpProvider:
    """Run a build that is killed and leaves its machine."""
    provider = provider_of(spec_of(), baked.reporter)
    baked.planned(provider, spec_of())
    baked.fails = KilledError()
    baked.cloud.fail("quota_of_region", name=MACHINE, on="delete")
    with pytest.raises(KilledError):
        baked.up_from(provider, spec_of())
    assert list(baked.cloud.instances) == [MACHINE]
    assert any("billed" in line for line in baked.reporter.lines)
    baked.fails = None
    baked.cloud.heal()
    return provider


def test_machine_of_a_build_killed_before_its_image_is_replaced(baked: Baked) -> None:
    """The machine is in Terraform's state. The plan lists it, and no confirmation is needed."""
    provider = killed(baked)
    spec = spec_of()
    cluster_id = baked.workspace.cluster_id()
    assert provider.alive(cluster_id)
    left = [leftover.what for leftover in provider.leftovers(cluster_id, workspace=None)]
    assert [what for what in left if what.startswith(f"instance {MACHINE} ")]
    planned = baked.planned(provider_of(spec), spec)
    assert MACHINE not in {host.name for host in planned.hosts}
    assert any(line.startswith(f"remove {MACHINE}") for line in planned.other)
    baked.up(spec)
    assert sorted(baked.cloud.instances) == ["demo-ctl", *NODES]
    made = [
        name for _, kind, name in baked.cloud.done("create") if kind == "google_compute_instance"
    ]
    assert made.count(MACHINE) == 2


def test_machine_of_a_build_that_failed_after_its_image_is_removed(baked: Baked) -> None:
    """Google refused to delete the machine when the image had been created."""
    baked.cloud.fail("quota_of_region", name=MACHINE, on="delete")
    with refused("leftovers/machine"):
        baked.up(spec_of())
    assert list(baked.cloud.instances) == [MACHINE]
    assert len(baked.images) == 1
    baked.cloud.heal()
    provider = provider_of(spec_of())
    baked.planned(provider, spec_of())
    # `image bake` does no more than this.
    assert baked.prepare(provider, spec_of()) == INPUTS
    assert not baked.cloud.instances
    assert len(baked.seen) == 1
    baked.up_from(provider, spec_of())
    assert sorted(baked.cloud.instances) == ["demo-ctl", *NODES]


def test_down_keeps_only_the_image_until_it_is_pruned(raised: Baked) -> None:
    spec = spec_of()
    cluster_id = raised.workspace.cluster_id()
    provider_of(spec).destroy(cluster_id, workspace=raised.workspace)
    assert provider_of(spec).leftovers(cluster_id, workspace=None) == ()
    (kept,) = provider_of(spec).kept_images()
    assert (kept.size_mib, kept.usd_per_month) == (2048, pytest.approx(0.1))
    assert provider_of(spec).kept_images(prune=True) == (kept,)
    assert not raised.images
    assert provider_of(spec).kept_images() == ()


def test_up_refuses_changes_beyond_the_shown_plan(raised: Baked) -> None:
    provider = provider_of(spec_of(3))
    raised.planned(provider, spec_of(3), inputs="fedcba9876543210")
    router = next(iter(raised.cloud.resources("google_compute_router").values()))["name"]
    raised.cloud.lose(router, "google_compute_router")
    with refused("plan-changed", StalePlanError, "router"):
        raised.up_from(provider, spec_of(3), inputs="fedcba9876543210")
    assert MACHINE not in raised.cloud.instances


def test_image_set_by_name_is_not_baked() -> None:
    own = {"project": "my-images", "name": "with-everything"}
    spec = spec_of(controller={"image": own}, partitions={"train": {"image": own}})
    found = image_error(spec)
    assert found is not None
    assert found.where == "provider.image.bake"
    assert image_error(spec_of()) is None


@pytest.fixture
def ahead(baked: Baked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Let `clusterctl image bake` install nothing. Errors in this list are raised instead."""
    monkeypatch.setenv("PATH", str(gcloud.install(tmp_path, baked.cloud.store.path)), prepend=":")
    failing: list[BaseException] = []

    def configure(session: ClusterContext, image: Inventory, *_: object) -> None:
        assert session.workspace.terraform.exists()
        assert [host.name for host in image.compute] == [MACHINE]
        if failing:
            raise failing.pop()

    monkeypatch.setattr(bake, "_bake_machine", configure)
    return failing


def test_image_bake_without_a_cluster_leaves_only_the_image(
    baked: Baked, tmp_path: Path, ahead: list[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the build succeeds, once it fails. The cluster is locked meanwhile."""
    workers: list[object] = []
    destroy = GcpProvider.destroy

    def seen(self: GcpProvider, cluster_id: str, *, workspace: Workspace | None) -> None:
        workers.append(workspace and (holder := workspace.lock_holder()) and holder.verb)
        destroy(self, cluster_id, workspace=workspace)

    monkeypatch.setattr(GcpProvider, "destroy", seen)
    workspace = Workspace(tmp_path / "none" / "demo")
    shown = list[tuple[str, ...]]()

    def refuse(images: tuple[str, ...]) -> None:
        shown.append(images)
        raise UsageError("nothing was done")

    with pytest.raises(UsageError):
        bake_image(ClusterContext.of(spec_of(), workspace=workspace, verb="bake"), refuse)
    assert not set(baked.cloud.resources().values())
    (line,) = shown.pop()
    assert "on demo-image (e2-standard-2, 0.067 USD" in line
    ahead.append(no_packages())
    with refused("no-packages"):
        bake_image(ClusterContext.of(spec_of(), workspace=workspace, verb="bake"))
    assert set(baked.cloud.resources().values()) <= NOT_BILLED
    assert not workspace.root.exists()
    assert bake_image(ClusterContext.of(spec_of(), workspace=workspace, verb="bake")) == "made"
    assert set(baked.cloud.resources().values()) <= {*NOT_BILLED, "google_compute_image"}
    assert len(baked.images) == 1
    assert not workspace.root.exists()
    assert (
        bake_image(ClusterContext.of(spec_of(), workspace=workspace, verb="bake"), refuse)
        == "cached"
    )
    assert not shown
    # What it took was removed under the lock that it was made under.
    assert set(workers) == {"bake"}


# The machine that a killed one left: test_machine_of_a_build_killed_before_its_image_is_replaced.
@pytest.mark.parametrize("is_spec_written", [True, False])
def test_image_bake_removes_leftovers_of_a_killed_bake(
    baked: Baked,
    tmp_path: Path,
    ahead: list[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    is_spec_written: bool,
) -> None:
    workspace = Workspace(tmp_path / "none" / "demo")
    if is_spec_written:
        ahead.append(KilledError())
        with monkeypatch.context() as patched:
            patched.setattr("clusterctl.cluster.bake.down_locked", lambda *_: None)
            with pytest.raises(KilledError):
                bake_image(ClusterContext.of(spec_of(), workspace=workspace, verb="bake"))
        assert not set(baked.cloud.resources().values()) <= NOT_BILLED
        assert workspace.spec.exists()
    else:
        workspace.create()
    assert bake_image(ClusterContext.of(spec_of(), workspace=workspace, verb="bake")) == "made"
    assert set(baked.cloud.resources().values()) <= {*NOT_BILLED, "google_compute_image"}
    assert not workspace.root.exists()


def test_image_bake_keeps_a_cluster_that_up_has_begun(
    baked: Baked, tmp_path: Path, ahead: list[BaseException]
) -> None:
    workspace = Workspace(tmp_path / "none" / "demo")
    workspace.create()
    workspace.spec.write_text("of `up`")
    ahead.append(no_packages())
    with refused("no-packages"):
        bake_image(ClusterContext.of(spec_of(), workspace=workspace, verb="bake"))
    assert workspace.spec.read_text() == "of `up`"
    assert not baked.images
