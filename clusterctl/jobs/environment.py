"""The Python environment that jobs ask for: resolved here, built once on the cluster, shared by its nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clusterctl.errors import CommandError, Notice, TransportError, UsageError, printable
from clusterctl.scheduler.script import ENVIRONMENTS, Environment, partition_name
from clusterctl.spec.job import JobSpec, Launcher
from clusterctl.state.facts import ClusterFacts
from clusterctl.transport.base import Conversation, Transport, lines, remote_argv
from clusterctl.transport.put import STORE, send_to_store
from clusterctl.transport.remote_open import HELD
from clusterctl.transport.tree import Progress, shown_size
from clusterctl.util.assets import job_lock
from clusterctl.util.process import temporary_folder
from clusterctl.util.progress import LineReporter

if TYPE_CHECKING:
    from clusterctl.packages.wheelhouse import Lock, NodePlatform, Wheel
    from clusterctl.spec.distributions import Distribution
    from clusterctl.spec.job_options import JobOptions
    from clusterctl.spec.models import ClusterSpec

_LOCK: Final = f"{ENVIRONMENTS}/.lock"
_BUILD_S: Final = 3600.0  # pip says nothing
_WAIT_S: Final = 1800.0  # for another one's build, which says nothing either
_BUILD: Final = (Path(__file__).parent / "remote_build.sh").read_text(encoding="utf-8")
_FETCH: Final = (Path(__file__).parent / "remote_fetch.sh").read_text(encoding="utf-8")
_LARGE: Final = 1 << 20  # bytes of a wheel that are sent more slowly than pip starts


def environment_of(
    facts: ClusterFacts,
    job: JobOptions | JobSpec | None = None,
    *,
    distribution: Callable[[], Distribution],
    report: LineReporter,
    heard: LineReporter = lambda _line: None,
    replayed: str | None = None,
) -> Environment:
    """What the requirements of a cluster, and of a job on top, come to. Nothing reaches the cluster yet.

    ``replayed`` is the text of a lock that takes their place, "" for no packages.

    Raises:
        UsageError: they can't be met, or the job can't have any.
        MachineError: wheels can't be kept here.
    """
    cluster = None if facts.requirements is None else Path(facts.requirements)
    own = job.requirements if job is not None else None
    base = job_lock()
    if isinstance(job, JobSpec) and (job.bundled or job.container):
        if own is None:
            return Environment(root=facts.root)
        raise UsageError(
            f"{'a container' if job.container else f'the bundled job {job.bundled}'} takes no requirements",
            code="no-requirements-here",
            why="it runs with a Python of its own",
            fix="leave --requirements out, or submit a script of yours",
        )
    if cluster is None and own is None and not replayed:
        return _with_torch(facts, job, None)
    from clusterctl.packages.accelerators import has_gpus  # noqa: PLC0415 - most jobs ask for no packages
    from clusterctl.packages.wheelhouse import NodePlatform, Requirements, resolve  # noqa: PLC0415 - as above

    node, lock = NodePlatform.of(distribution()), None
    if replayed is not None:
        lock = _replayed(replayed, node, report, heard) if replayed else None
    elif cluster is not None:
        lock = resolve(
            Requirements((cluster,), base, node=node, gpus=has_gpus(facts)), report=report, heard=heard
        )
    if own is not None:
        held = {wheel.name: wheel.version for wheel in lock.wheels} if lock else {}
        files = (own,) if cluster is None else (cluster, own)
        gpus = has_gpus(facts, _partition_name(facts, job)) if job is not None else None
        lock = resolve(Requirements(files, base, held, node, gpus), report=report, heard=heard)
    return _with_torch(facts, job, lock)


def _replayed(text: str, node: NodePlatform, report: LineReporter, heard: LineReporter) -> Lock:
    """The lock of an earlier job; on nodes with another Python, the same versions for that."""
    from clusterctl.packages.wheelhouse import Lock, Requirements, locked, resolve  # noqa: PLC0415 - as above

    if (lock := locked(text, job_lock(), node, report=report, heard=heard)) is not None:
        return lock
    was = text.partition("\n")[0].strip("# ")
    report(
        Notice("packages-for-another-python", f"note: the packages were for {was}: now they are for {node}")
    )
    with temporary_folder() as folder:
        wanted = folder / "requirements.txt"
        wanted.write_text("".join(f"{wheel.name}=={wheel.version}\n" for wheel in Lock.read(text, {}).wheels))
        return resolve(Requirements((wanted,), job_lock(), node=node), report=report, heard=heard)


def _partition_name(facts: ClusterFacts, job: JobOptions | JobSpec) -> str | None:
    """The partition that a job goes to; None where its script may name another."""
    if isinstance(job, JobSpec):
        return partition_name(facts, job)
    return job.partition or facts.partitions[0].name


def _with_torch(facts: ClusterFacts, job: JobOptions | JobSpec | None, lock: Lock | None) -> Environment:
    """The environment of a lock, or of none; refused if it lacks what the job's launcher comes with."""
    by_torch = isinstance(job, JobSpec) and job.launcher is Launcher.TORCHRUN
    if by_torch and (lock is None or not any(wheel.name == "torch" for wheel in lock.wheels)):
        raise UsageError(
            "torchrun comes with torch, which the job's Python does not have",
            code="torchrun-without-torch",
            fix="say --requirements FILE with a line that says torch",
        )
    return Environment(lock if lock is not None and lock.wheels else None, facts.root)


def unbuilt(spec: ClusterSpec, distribution: Distribution, to: Callable[[], Transport]) -> str:
    """What is to be done yet for the spec's requirements on the cluster; "" if nothing. Only looks.

    ``to`` connects as the job user.
    """
    if spec.software.python.requirements is None:
        return ""
    from clusterctl.packages.accelerators import has_gpus  # noqa: PLC0415 - as above
    from clusterctl.packages.wheelhouse import NodePlatform, Requirements, cached_lock  # noqa: PLC0415 - as above

    files, node = (spec.software.python.requirements,), NodePlatform.of(distribution)
    lock = cached_lock(Requirements(files, job_lock(), node=node, gpus=has_gpus(spec)))
    if lock is None:
        return "its packages are chosen anew"
    if not lock.wheels or _is_there(to(), lock):
        return ""
    count = len(lock.wheels)
    return "1 package is installed" if count == 1 else f"{count} packages are installed"


def build(
    transport: Transport,
    environment: Environment,
    *,
    report: LineReporter,
    progress: Progress = lambda *_: None,
    rented: bool = False,
    wait_s: float = _WAIT_S,
) -> bool:
    """Have the environment on the cluster, whole; whether it had to be built. ``transport``: the job user's.

    A ``rented`` host is reached through a tunnel, which is slow: it fetches large wheels itself if it can.
    While another one builds, it is waited for, up to ``wait_s``. After a build that was killed at any moment,
    the next one builds anew.

    Raises:
        TransportError: it can't be built, or the connection broke.
        TransferError, UsageError, MachineError: the wheels can't be sent; see ``send_to_store``.
    """
    if environment.lock is None or _is_there(transport, environment.lock):
        return False
    fetched = _fetch(transport, environment.lock, environment.base, report) if rented else None
    sent = _send(transport, environment.lock, fetched, report, progress)
    key = environment.lock.key
    argv = ["sh", "-c", _BUILD, "build", key, environment.base, f"{wait_s:g}", str(HELD), ENVIRONMENTS]
    built = False
    try:
        with transport.converse(argv, silence_s=_BUILD_S) as talk:
            talk.send(sent)
            for line in _lines_of(talk):
                if line == b"waiting":
                    report("waiting for another clusterctl that builds an environment")
                elif line == b"building":
                    report("building the environment")
                    built = True
            talk.finish()
    except CommandError as exc:
        if exc.rc == HELD:
            raise _held(transport, wait_s) from exc
        raise TransportError(
            "the Python environment can't be built on the cluster",
            code="environment-failed",
            where=transport.host,
            why=exc.why,
            fix="see whether the home of the job user is there and has room (`clusterctl ssh`)",
            host=transport.host,
        ) from exc
    return built


def _lines_of(talk: Conversation) -> Iterator[bytes]:
    return lines(iter(talk.receive, b""), TransportError("a line does not end", code="line-too-long"))


def _held(transport: Transport, wait_s: float) -> TransportError:
    holders = transport.run(remote_argv("clusterctl.transport.remote_open", _LOCK), check=False)
    return TransportError(
        "the Python environment can't be built on the cluster: builds are locked",
        code="environment-locked",
        where=transport.host,
        why=f"~/{_LOCK} is still locked after {wait_s:g} s by {printable(holders.stdout.strip()) or '?'}",
        fix="let that build end; if it is none, end that process (`clusterctl ssh`, `clusterctl cancel`)",
        host=transport.host,
    )


def _is_there(transport: Transport, lock: Lock) -> bool:
    argv = ["sh", "-c", f'[ -e "$HOME/{ENVIRONMENTS}/$1" ]', "sh", lock.key]
    return transport.run(argv, check=False).rc == 0


def _fetch(transport: Transport, lock: Lock, base: str, report: LineReporter) -> frozenset[str]:
    """Have the host download large wheels from a package index into the store; the hashes of those there."""
    from clusterctl.packages.accelerators import cpu_index  # noqa: PLC0415 - as above

    sizes = {wheel: size for wheel in lock.wheels if (size := _size(wheel)) >= _LARGE}
    if not sizes:
        return frozenset()
    report(f"{transport.host} fetches {len(sizes)} wheels, {shown_size(sum(sizes.values()))}")
    more = ["--extra-index-url", cpu_index()] if any("+cpu" in wheel.version for wheel in sizes) else []
    argv = ["sh", "-c", _FETCH, "fetch", base, STORE, *more]
    found: list[bytes] = []
    with suppress(CommandError), transport.converse(argv, silence_s=_BUILD_S) as talk:
        talk.send("".join([*(f"{wheel}\n" for wheel in sizes), "\n"]).encode())
        found += _lines_of(talk)
        talk.finish()
    return frozenset(line.decode(errors="replace") for line in found)


def _size(wheel: Wheel) -> int:
    from clusterctl.packages.wheelhouse import wheel_path  # noqa: PLC0415 - as above

    return wheel_path(wheel).stat().st_size


def _send(
    transport: Transport,
    lock: Lock,
    fetched: frozenset[str] | None,
    report: LineReporter,
    progress: Progress,
) -> bytes:
    """Have the wheels and the lock in the store; what the build reads of them."""
    from clusterctl.packages.wheelhouse import wheel_path  # noqa: PLC0415 - as above

    if sizes := [_size(wheel) for wheel in lock.wheels if wheel.sha256 not in (fetched or ())]:
        why = ": no package index that the host reaches has the large ones"
        is_slow = fetched is not None and max(sizes) >= _LARGE
        report(f"sending {len(sizes)} wheels, {shown_size(sum(sizes))}{why if is_slow else ''}")
    with temporary_folder() as folder:
        text = folder / "requirements.lock"
        text.write_text(lock.text)
        there = send_to_store(transport, [*map(wheel_path, lock.wheels), text], progress=progress)
    return "".join([*(f"{path.name} {at}\n" for path, at in there.items()), "\n"]).encode()
