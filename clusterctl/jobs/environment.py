"""Python environments of jobs: pip chooses the packages on this machine; the hosts install them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clusterctl.errors import CommandError, Notice, TransportError
from clusterctl.packages.accelerators import cpu_index, has_gpus
from clusterctl.packages.wheelhouse import (
    Lock,
    NodePlatform,
    Requirements,
    Wheel,
    cached_lock,
    fetch_locked,
    resolve,
    wheel_path,
)
from clusterctl.scheduler.script import ENVIRONMENTS, Environment, partition_name
from clusterctl.scheduler.session import Session
from clusterctl.spec.distributions import DEFAULT, Distribution, distribution_of
from clusterctl.spec.job import JobSpec
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.facts import ClusterFacts
from clusterctl.state.inventory import applied_spec, planned_distribution
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Conversation, Transport, split_lines
from clusterctl.transport.put import STORE, send_to_store
from clusterctl.transport.remote_open import HELD
from clusterctl.transport.tree import Progress, format_size
from clusterctl.util.assets import job_lock
from clusterctl.util.process import temporary_folder
from clusterctl.util.progress import SILENT, LineReporter

if TYPE_CHECKING:
    from clusterctl.spec.job_options import JobOptions

_LOCK: Final = f"{ENVIRONMENTS}/.lock"
# Longest silence of pip during a build, and longest wait for a build by another clusterctl.
_BUILD_S: Final = 3600.0
_WAIT_S: Final = 1800.0
_BUILD: Final = (Path(__file__).parent / "remote_build.sh").read_text(encoding="utf-8")
_FETCH: Final = (Path(__file__).parent / "remote_fetch.sh").read_text(encoding="utf-8")
# Sending a larger wheel takes longer than starting pip on the host.
_LARGE: Final = 1 << 20  # bytes


def distribution_of_hosts(workspace: Workspace, spec: ClusterSpec | None = None) -> Distribution:
    """Return the Linux distribution that the hosts of ``spec`` (None: of the last `up`) have or will get."""
    return planned_distribution(spec or applied_spec(workspace), workspace) or distribution_of(DEFAULT)


def describe_pending_build(spec: ClusterSpec, distribution: Distribution, transport: Transport) -> str:
    """Return a text on changes by `clusterctl up` for a spec's requirements: "2 packages are installed".

    Returns "" if nothing has to be installed. transport: a connection to the controller as the job user.
    """
    if spec.software.python.requirements is None:
        return ""
    files, node = (spec.software.python.requirements,), NodePlatform.of(distribution)
    lock = cached_lock(Requirements(files, job_lock(), node=node, gpus=has_gpus(spec)))
    if lock is None:
        return "its packages are resolved again"
    if not lock.wheels or _is_there(transport, lock):
        return ""
    count = len(lock.wheels)
    return "1 package is installed" if count == 1 else f"{count} packages are installed"


@dataclass(frozen=True, slots=True)
class Environments:
    """Resolves pip requirements on this machine, and installs Python environments on the cluster.

    report: called with each message for the user. heard: called with each line that pip prints.
    wait_s: maximum wait for another clusterctl that installs an environment, in seconds.
    """

    report: LineReporter
    heard: LineReporter = SILENT.note
    progress: Progress = lambda *_: None
    wait_s: float = _WAIT_S

    def resolve(
        self,
        facts: ClusterFacts,
        distribution: Distribution,
        job: JobOptions | JobSpec | None = None,
        replayed: str | None = None,
    ) -> Environment:
        """Return the Python environment for the pip requirements of a cluster and a job. Nothing is sent.

        job: adds its own requirements to those of the cluster. None: no job.
        replayed: for a job that is submitted again, its earlier lock file, used in place of the cluster's
            requirements; "" if the job had no packages.

        Raises:
            UsageError: the requirements can't be met.
            MachineError: wheels can't be stored on this machine.
        """
        base, node, lock = job_lock(), NodePlatform.of(distribution), None
        files = () if facts.requirements is None else (Path(facts.requirements),)
        if replayed:
            lock = self._replayed(replayed, node)
        elif replayed is None and files:
            lock = self._resolve(Requirements(files, base, node=node, gpus=has_gpus(facts)))
        if job is not None and job.requirements is not None:
            held = {wheel.name: wheel.version for wheel in lock.wheels} if lock else {}
            gpus = has_gpus(facts, _partition_name(facts, job))
            lock = self._resolve(Requirements((*files, job.requirements), base, held, node, gpus))
        return Environment(lock if lock is not None and lock.wheels else None, facts.root)

    def _resolve(self, requirements: Requirements) -> Lock:
        return resolve(requirements, report=self.report, heard=self.heard)

    def _replayed(self, text: str, node: NodePlatform) -> Lock:
        """Parse an earlier job's lock file. If it is for another Python, find wheels of the same versions."""
        if (lock := fetch_locked(text, job_lock(), node, report=self.report, heard=self.heard)) is not None:
            return lock
        earlier_platform = text.partition("\n")[0].strip("# ")
        note = f"the original job used packages for {earlier_platform}; this job uses packages for {node}"
        self.report(Notice("packages-for-another-python", note))
        with temporary_folder() as folder:
            file = folder / "requirements.txt"
            wheels = Lock.read(text, {}).wheels
            file.write_text("".join(f"{wheel.name}=={wheel.version}\n" for wheel in wheels))
            return self._resolve(Requirements((file,), job_lock(), node=node))

    def build(self, transport: Transport, environment: Environment, *, rented: bool = False) -> bool:
        """Install a Python environment on a host, unless the host has it. Return whether it was installed.

        Waits for another clusterctl that is installing. An interrupted installation is later started anew.

        transport: a connection to the host as the job user.
        rented: the host is in a cloud, so it downloads large wheels itself, faster than they can be sent.

        Raises:
            TransportError: the environment can't be installed, or the connection was lost.
            TransferError, UsageError, MachineError: the wheels can't be sent; see ``send_to_store``.
        """
        if environment.lock is None or _is_there(transport, environment.lock):
            return False
        fetched = self._fetch(transport, environment.lock, environment.base) if rented else None
        sent = self._send(transport, environment.lock, fetched)
        key, wait_s = environment.lock.key, f"{self.wait_s:g}"
        argv = ["sh", "-c", _BUILD, "build", key, environment.base, wait_s, str(HELD), ENVIRONMENTS]
        built = False
        try:
            with transport.converse(argv, silence_s=_BUILD_S) as talk:
                talk.send(sent)
                for line in _lines_of(talk):
                    if line == b"waiting":
                        self.report("waiting for another clusterctl that is building an environment")
                    elif line == b"building":
                        self.report("building the environment")
                        built = True
                talk.finish()
        except CommandError as exc:
            raise (self._held(transport) if exc.rc == HELD else _not_built(transport, exc)) from exc
        return built

    def build_for(self, session: Session, environment: Environment, partition: str | None) -> None:
        """Install it on the controller and, without shared folder, on nodes of a partition (None: all)."""
        rented = environment.lock is not None and session.spec.provider.is_cloud
        for transport in (session.transport, *session.transports_of_partition(partition)):
            self.build(transport, environment, rented=rented)

    def _held(self, transport: Transport) -> TransportError:
        return TransportError(
            "the Python environment can't be built on the cluster: builds are locked",
            code="environment-locked",
            where=transport.host,
            why=f"~/{_LOCK} is still locked after {self.wait_s:g} s",
            fix="wait for the other build; if there is none, end the process that holds the lock: "
            f"`clusterctl ssh {transport.host} -- lslocks` shows it. If homes are shared, try each node",
            host=transport.host,
        )

    def _fetch(self, transport: Transport, lock: Lock, base: str) -> frozenset[str]:
        """Make a host download large wheels of ``lock``. Return hashes of those that the host then has."""
        sizes = {wheel: size for wheel in lock.wheels if (size := _size(wheel)) >= _LARGE}
        if not sizes:
            return frozenset()
        self.report(
            f"{transport.host} is downloading {len(sizes)} wheels, {format_size(sum(sizes.values()))}"
        )
        more = ["--extra-index-url", cpu_index()] if any("+cpu" in wheel.version for wheel in sizes) else []
        argv = ["sh", "-c", _FETCH, "fetch", base, STORE, *more]
        lines: list[bytes] = []
        with suppress(CommandError), transport.converse(argv, silence_s=_BUILD_S) as talk:
            talk.send("".join([*(f"{wheel}\n" for wheel in sizes), "\n"]).encode())
            lines += _lines_of(talk)
            talk.finish()
        return frozenset(line.decode(errors="replace") for line in lines)

    def _send(self, transport: Transport, lock: Lock, fetched: frozenset[str] | None) -> bytes:
        if sizes := [_size(wheel) for wheel in lock.wheels if wheel.sha256 not in (fetched or ())]:
            reason = f": {transport.host} can't download the large wheels from a package index"
            is_slow = fetched is not None and max(sizes) >= _LARGE
            size = format_size(sum(sizes))
            self.report(f"sending {len(sizes)} wheels, {size}{reason if is_slow else ''}")
        with temporary_folder() as folder:
            text = folder / "requirements.lock"
            text.write_text(lock.text)
            files = [*map(wheel_path, lock.wheels), text]
            remote_paths = send_to_store(transport, files, progress=self.progress)
        return "".join([*(f"{path.name} {target}\n" for path, target in remote_paths.items()), "\n"]).encode()


def _partition_name(facts: ClusterFacts, job: JobOptions | JobSpec) -> str | None:
    """Return the name of a job's partition; None if #SBATCH lines of the job's script may set it."""
    if isinstance(job, JobSpec):
        return partition_name(facts, job)
    return job.partition or facts.partitions[0].name


def _lines_of(talk: Conversation) -> Iterator[bytes]:
    error = TransportError("the environment's build printed a line that is too long", code="line-too-long")
    return split_lines(iter(talk.receive, b""), error)


def _not_built(transport: Transport, cause: CommandError) -> TransportError:
    return TransportError(
        "the Python environment can't be built on the cluster",
        code="environment-failed",
        where=transport.host,
        why=cause.why,
        fix="check that the job user's home folder exists and has free space (`clusterctl ssh`)",
        host=transport.host,
    )


def _is_there(transport: Transport, lock: Lock) -> bool:
    argv = ["sh", "-c", f'[ -e "$HOME/{ENVIRONMENTS}/$1" ]', "sh", lock.key]
    return transport.run(argv, check=False).rc == 0


def _size(wheel: Wheel) -> int:
    return wheel_path(wheel).stat().st_size
