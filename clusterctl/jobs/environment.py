"""Python environments of jobs: uv chooses the packages on this machine; the hosts install them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clusterctl.errors import CommandError, Notice, UsageError
from clusterctl.packages.accelerators import cpu_index, has_gpus
from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.package_files import suggesting_no_requirements
from clusterctl.packages.project_files import PackageList
from clusterctl.packages.remote_environment import BUILD_S, WAIT_S, build_environment, lines_of
from clusterctl.packages.resolution import Requirements, cached_lock, resolve
from clusterctl.packages.wheelhouse import Pip, Wheel, WheelLock, fetch_locked, wheel_path
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.sites.script import Environment
from clusterctl.spec.distributions import DEFAULT, Distribution, distribution_of
from clusterctl.spec.job_options import JobOptions
from clusterctl.state.inventory import Inventory, applied_spec, planned_distribution
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Transport
from clusterctl.transport.put import store_of
from clusterctl.transport.tree import Progress
from clusterctl.util import formatting
from clusterctl.util.assets import job_lock
from clusterctl.util.numbers import counted
from clusterctl.util.process import Result, temporary_folder
from clusterctl.util.progress import SILENT, LineReporter

if TYPE_CHECKING:
    from clusterctl.spec.models import ClusterSpec

_PREFIX: Final = (Path(__file__).parent / "remote_prefix.sh").read_text(encoding="utf-8")
_FETCH: Final = (Path(__file__).parent / "remote_fetch.sh").read_text(encoding="utf-8")
# Sending a larger wheel takes longer than starting pip on the host.
_LARGE: Final = 1 << 20  # bytes


def describe_pending_build(
    spec: ClusterSpec, distribution: Distribution, transport: Transport
) -> str:
    """Return a text on what `up` changes for a spec's requirements: "2 packages are installed".

    Returns "" if nothing has to be installed. transport: a connection to the controller as the job
    user.
    """
    if spec.software.python.requirements is None:
        return ""
    node = NodePlatform.of(distribution)
    lock = cached_lock(Requirements.of_cluster(spec, spec.software.python.requirements, node))
    if lock is None:
        return "its packages are resolved again"
    if not lock.wheels or _is_there(transport, Environment(lock)):
        return ""
    verb = "is" if len(lock.wheels) == 1 else "are"
    return f"{counted(len(lock.wheels), 'package')} {verb} installed"


@dataclass(frozen=True, slots=True)
class Environments:
    """Resolves pip requirements on this machine, and installs Python environments on the cluster.

    report: called with each message for the user. heard: called with each line that uv and pip print.
    wait_s: maximum wait for another clusterctl that installs an environment, in seconds.
    """

    report: LineReporter
    heard: LineReporter = SILENT.note
    progress: Progress = lambda *_: None
    wait_s: float = WAIT_S

    def resolve(
        self,
        inventory: Inventory,
        distribution: Distribution,
        job: JobOptions | None = None,
        replayed: str | None = None,
        partition: str | None = None,
    ) -> Environment:
        """Return the Python environment for a cluster's and a job's requirements. Send nothing.

        job: adds its own requirements to those of the cluster. None: no job.
        replayed: for a job that is submitted again, its earlier lock file, used in place of the
            cluster's requirements; "" if the job had no packages.

        Raises:
            UsageError: the requirements can't be met.
            MachineError: an index can't be read, or wheels can't be stored on this machine.
        """
        node = NodePlatform.of(distribution)
        lock = None
        if inventory.python:
            node = NodePlatform(inventory.python, inventory.glibc_minor)
        common = None
        if inventory.requirements is not None:
            common = Requirements.of_cluster(inventory, Path(inventory.requirements), node)
        if replayed:
            lock = self._replayed(replayed, node)
        elif replayed is None and common is not None:
            lock = self._resolve(common)
        if job is not None and job.requirements:
            held = {wheel.name: wheel.version for wheel in lock.wheels} if lock else {}
            gpus = has_gpus(inventory, partition)
            with suggesting_no_requirements():
                own = PackageList.read(job.requirements, node)
                if not own.is_of_pip:
                    self.report(own.summary)
                lists = (*(common.lists if common else ()), own)
                lock = self._resolve(Requirements(lists, job_lock(), held, node, gpus))
        return Environment.of(inventory, lock if lock is not None and lock.wheels else None)

    def resolve_for_job(
        self,
        inventory: Inventory,
        workspace: Workspace,
        spec: ClusterSpec | None,
        job: JobOptions,
        replayed: str | None,
        *,
        partition: str | None,
    ) -> Environment:
        """Do the same as ``resolve``, for the distribution that a spec's hosts have or will get.

        spec: None: that of the last `up`.
        """
        planned = planned_distribution(spec or applied_spec(workspace), workspace)
        node = planned or distribution_of(DEFAULT)
        return self.resolve(inventory, node, job, replayed, partition)

    def _resolve(self, requirements: Requirements) -> WheelLock:
        return resolve(requirements, Pip(requirements.node, self.report, self.heard))

    def _replayed(self, text: str, node: NodePlatform) -> WheelLock:
        """Parse an earlier job's lock file. If it is for another Python, find wheels of the same
        versions.
        """
        pip = Pip(node, self.report, self.heard)
        if (lock := fetch_locked(text, job_lock(), pip)) is not None:
            return lock
        earlier_platform = text.partition("\n")[0].strip("# ")
        note = (
            f"the original job used packages for {earlier_platform}; this job uses packages for "
            f"{node}"
        )
        self.report(Notice("packages-for-another-python", note))
        with temporary_folder() as folder:
            file = folder / "requirements.txt"
            wheels = WheelLock.read(text, {}).wheels
            file.write_text("".join(f"{wheel.name}=={wheel.version}\n" for wheel in wheels))
            lists = (PackageList.read(file, node),)
            return resolve(Requirements(lists, job_lock(), node=node), pip)

    def build(
        self, transport: Transport, environment: Environment, *, rented: bool = False
    ) -> bool:
        """Install a Python environment on a host that lacks it. Return whether it was installed.

        Waits for another clusterctl that is installing. An interrupted installation is later
        started anew.

        transport: a connection to the host as the job user.
        rented: the host is in a cloud, so it downloads large wheels itself, faster than they can be
            sent.

        Raises:
            TransportError: the environment can't be installed, or the connection was lost.
            TransferError, UsageError, MachineError: the wheels can't be sent; see ``Upload``.
        """
        if environment.lock is None or _is_there(transport, environment):
            return False
        lock = environment.lock
        base = environment.base
        fetched = self._fetch(transport, environment, lock) if rented else None
        self._report_sending(transport.host, lock, fetched)
        return build_environment(
            transport,
            lock,
            [*map(wheel_path, lock.wheels)],
            folder=environment.environments,
            store=store_of(environment.folder),
            report=self.report,
            base=base,
            wait_s=self.wait_s,
            progress=self.progress,
        )

    def build_for(self, session: Session, environment: Environment, partition: str | None) -> None:
        """Install it on the controller and, without shared folder, on nodes of a partition (None:
        all).
        """
        rented = environment.lock is not None and session.spec.provider.is_cloud
        for transport in (session.transport, *session.transports_of_partition(partition)):
            self.build(transport, environment, rented=rented)

    def _fetch(
        self, transport: Transport, environment: Environment, lock: WheelLock
    ) -> frozenset[str]:
        """Make a host download large wheels of ``lock``. Return the hashes that it then has."""
        sizes = {wheel: size for wheel in lock.wheels if (size := _size(wheel)) >= _LARGE}
        if not sizes:
            return frozenset()
        self.report(
            f"{transport.host} is downloading {counted(len(sizes), 'wheel')}, "
            f"{formatting.size(sum(sizes.values()))}"
        )
        more = (
            ["--extra-index-url", cpu_index()]
            if any("+cpu" in wheel.version for wheel in sizes)
            else []
        )
        argv = ["sh", "-c", _FETCH, "fetch", environment.base, store_of(environment.folder), *more]
        lines: list[bytes] = []
        with suppress(CommandError), transport.converse(argv, silence_s=BUILD_S) as talk:
            talk.send("".join([*(f"{wheel}\n" for wheel in sizes), "\n"]).encode())
            lines += lines_of(talk)
            talk.finish()
        return frozenset(line.decode(errors="replace") for line in lines)

    def _report_sending(self, host: str, lock: WheelLock, fetched: frozenset[str] | None) -> None:
        if sizes := [_size(wheel) for wheel in lock.wheels if wheel.sha256 not in (fetched or ())]:
            reason = f": {host} can't download the large wheels from a package index"
            is_slow = fetched is not None and max(sizes) >= _LARGE
            size = formatting.size(sum(sizes))
            self.report(
                f"sending {counted(len(sizes), 'wheel')}, {size}{reason if is_slow else ''}"
            )


def existing_environment(
    session: Session, wanted: str, partition: str | None, *, needs_python: bool
) -> str:
    """Return the absolute folder of an environment that exists on a cluster.

    wanted: its folder, or the name of an environment of conda. partition: where the job runs. None:
    unknown. needs_python: whether the job's program is in Python.

    Raises:
        UsageError: there is no such environment, or a node can't run it.
        TransportError: the cluster can't be reached.
    """
    nodes = [
        node
        for facts in session.inventory.partitions
        if partition in (None, facts.name)
        for node in facts.nodes
        if node in session.nodes
    ]
    # Usually the nodes are alike, so that the first is enough.
    transports = [session.transport, *(session.nodes[node] for node in nodes[:1])]
    folder = wanted
    for transport in transports:
        argv = ["sh", "-c", _PREFIX, "prefix", folder]
        result = transport.run(argv, check=False)
        found, _, python = result.stdout.partition("\n")
        if result.rc or (needs_python and not python.strip()):
            raise _unfit_environment(wanted, transport.host, result)
        folder = found
    return folder


def _unfit_environment(wanted: str, host: str, result: Result) -> UsageError:
    fix = "use --env-path with the folder of an environment that exists on all nodes"
    match result.rc:
        case 0:
            reason = f"{result.stdout.strip()} has no bin/python"
        case 3:
            reason = "there is no such folder with a folder `bin` that the job user can read"
            if "/" not in wanted:
                reason = "conda has no environment with this name there"
        case 4:
            reason = result.stderr.strip()[-500:] or "its bin/python does not run"
        case 5:
            reason = f"several have this name: {', '.join(result.stdout.splitlines())}"
        case _:
            reason = result.stderr.strip()[-500:]
    return UsageError(
        f"the environment {wanted} can't be used",
        code="packages-unmet",
        about="environment",
        where=host,
        why=reason,
        fix=fix,
    )


def _is_there(transport: Transport, environment: Environment) -> bool:
    # An environment that no job has used for long is removed by a later build.
    used = f"touch -c -- {environment.bin}/../requirements.lock 2>/dev/null || :"
    # `attach` takes the sums from an environment that has lost files.
    whole = f"[ -e {environment.bin} ] && [ -e {environment.bin}/../SHA256SUMS ]"
    argv = ["sh", "-c", f"{whole} || exit 1; {used}"]
    return transport.run(argv, check=False).rc == 0


def _size(wheel: Wheel) -> int:
    return wheel_path(wheel).stat().st_size
