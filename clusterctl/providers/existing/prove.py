"""Proof by a job that MPI programs run on an attached cluster, and the job's facts about the nodes.

If the job of `attach` does not start in time, the user's first job runs the proof.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import TransportError, printable
from clusterctl.providers.existing.place import (
    Placed,
    place,
    usable_pythons,
    with_standalone_python,
    write_profile,
)
from clusterctl.providers.existing.site_description import MPI_MODULE, SiteDescription
from clusterctl.spec.names import ENGINES, PROOF_JOB, Launcher
from clusterctl.transport.base import BOOT, Transport, module_texts, split_lines
from clusterctl.util.assets import data_folder
from clusterctl.util.progress import SILENT, Reporter

# The launchers are tried in this order. Jobs start ranks in no other way, so no other launcher is
# tried.
LAUNCHERS: Final = ("pmix", "mpirun")
_SILENCE_S: Final = 120.0
# How long a job without a time limit of its own is waited for.
_UNLIMITED_MINUTES: Final = 5
_MPI_MODULE: Final = re.compile(MPI_MODULE, re.IGNORECASE)
_MOST_MODULES: Final = 6
_PROVE: Final = Path(__file__).with_name("remote_prove.sh").read_text(encoding="utf-8")
_PROOF: Final = Path(__file__).with_name("remote_proof.sh").read_text(encoding="utf-8")
_LEAVE: Final = Path(__file__).with_name("remote_leave.sh").read_text(encoding="utf-8")
# File systems that nodes share.
_SHARED: Final = re.compile(
    r"nfs|lustre|gpfs|beegfs|ceph|panfs|afs|cifs|smb|glusterfs|fuse|9p|virtiofs|pvfs2|wekafs|autofs"
)
# A proof ends after at most 300 + 90 s, see remote_leave.sh.
_READ: Final = """\
cd -- "$1/proof.active" 2>/dev/null || exit
grep -qsx end facts || [ -n "$(find job -mmin +7 2>/dev/null)" ] || exit
cat job facts 2>/dev/null || true
"""


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial to start the MPI test: the modules, the launcher, and why it failed. "": it worked.

    The launcher is "" if no launcher was tried, because a module or its MPI library can't be
    loaded.
    """

    modules: str
    launcher: str
    failure: str


@dataclass(frozen=True, slots=True)
class Nodes:
    """The facts that the job found on its nodes, which are compute nodes of the site.

    names: the job's nodes. version: of the Python of jobs on the nodes. "": it does not run on all
        nodes.
    pythons: path -> version of the Pythons on PATH of all nodes. glibc: the oldest on the nodes.
    internet: whether a node reaches a package index. gpus: node -> lines of `nvidia-smi -L`.
    scratch: the usual folders for files of a job, such as $TMPDIR and /scratch, that all nodes have
        on a local disk or in memory -> type of the file system and the least free KiB.
    engines: name of the program -> version of the container engines that all nodes have.
    not_shared: nodes that don't see the folder, or whose files the login node does not see.
    """

    names: tuple[str, ...] = ()
    version: str = ""
    pythons: Mapping[str, str] = field(default_factory=dict)
    glibc: str = ""
    arch: str = ""
    internet: bool = False
    gpus: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scratch: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    engines: Mapping[str, str] = field(default_factory=dict)
    not_shared: tuple[str, ...] = ()

    def oldest_glibc(self, minor: int) -> int:
        """Return the x of the nodes' glibc 2.x, or ``minor`` if that is older or the nodes' is
        unknown.
        """
        own = self.glibc.partition(".")[2]
        return min(minor, int(own)) if own.isdecimal() else minor


@dataclass(frozen=True, slots=True)
class Proof:
    """The MPI test gave the right answer on all nodes of a job.

    launcher: one of ``LAUNCHERS``. modules: environment modules that it needs. judged: the test's
        answer.
    seconds: duration of the test. trials: all trials, the last of which worked.
    """

    launcher: str
    modules: tuple[str, ...]
    nodes: Nodes
    judged: Mapping[str, Any]
    seconds: float
    trials: tuple[Trial, ...]

    @property
    def settings(self) -> dict[str, object]:
        """The settings of the spec that the proof decides."""
        launcher = Launcher.SRUN if self.launcher == "pmix" else Launcher.MPIRUN
        return {"modules": self.modules, "launcher": launcher}


@dataclass(frozen=True, slots=True)
class Unproven:
    """The proof failed, or its job did not start in time and was cancelled.

    code: `pending`, `refused` (by sbatch), `ended` (without an answer), `not-shared`, `python` (the
    environment does not run on the nodes), or `mpi` (no trial worked). why: the message of Slurm or
    the test.
    expected_start: the expected start of a pending job, as squeue prints it.
    """

    code: str
    why: str
    nodes: Nodes = Nodes()
    trials: tuple[Trial, ...] = ()
    expected_start: str = ""


@dataclass(frozen=True, slots=True)
class ProofOptions:
    """The options of the proof's job, and of the environment that it tests.

    is_routed: the job names no partition. minutes: its time limit. slurm: more options of sbatch.
    modules: environment modules to load first. Default: no module.
    others: whether to try no module, then each MPI module of the site, after ``modules``.
        Otherwise, MPI modules are tried together with ``modules``, unless these have one.
    launcher: the launcher to try first. other_launchers: whether to try the rest too.
    patience_s: longest wait for the start of the job, which is then cancelled.
    python: path of the jobs' Python. Default: the first of the site's that jobs can use.
    reporter: shown the progress of the environment.
    """

    partition: str
    is_routed: bool = False
    account: str = ""
    qos: str = ""
    minutes: str = ""
    slurm: Sequence[str] = ()
    modules: Sequence[str] = ()
    others: bool = True
    launcher: Launcher | None = None
    other_launchers: bool = True
    patience_s: float = 60.0
    python: str | None = None
    reporter: Reporter = SILENT


def prove(
    transport: Transport, site: SiteDescription, placed: Placed, options: ProofOptions
) -> Proof | Unproven:
    """Run the proof as a job on two nodes, or on the only node of the partition. Wait for its end.

    On success, the script that jobs source first gets the modules of the proof.

    Raises:
        TransportError: the connection was lost. The job is cancelled.
    """
    sizes = [part.node_count for part in site.partitions if part.name == options.partition]
    script = proof_script(site, placed, options)
    probe = probe_texts()
    words = [f"--nodes={min([2, *sizes])}", "--ntasks-per-node=1"]
    named = {
        "time": options.minutes,
        "partition": "" if options.is_routed else options.partition,
        "account": options.account,
        "qos": options.qos,
    }
    words += [f"--{name}={value}" for name, value in named.items() if value]
    words += options.slurm
    limit_s = int(options.minutes or _UNLIMITED_MINUTES) * 60
    numbers = (f"{options.patience_s:.0f}", str(limit_s), str(len(script)), str(len(probe)))
    name = f"{PROOF_JOB}{placed.cluster_id}"
    argv = ["sh", "-c", _PROVE, "prove", placed.folder, name, site.slurm_path, *numbers, *words]
    too_long = TransportError(
        "the proof's job printed a line that is too long", code="line-too-long"
    )
    with transport.converse(argv, silence_s=_SILENCE_S) as talk:
        talk.send(script + probe)
        lines = [
            line.decode(errors="replace") for line in split_lines(iter(talk.receive, b""), too_long)
        ]
        talk.finish()
    outcome = read_facts(line for line in lines if line != "waiting")
    if isinstance(outcome, Proof):
        write_profile(transport, placed.folder, outcome.modules, site.slurm_path)
    return outcome


def probe_texts() -> bytes:
    """Return the MPI test, as the proof's script reads it from the file probe.json."""
    return module_texts("payload.commands.probe", data_folder("payload").parent).encode()


def proof_script(site: SiteDescription, placed: Placed, options: ProofOptions) -> bytes:
    """Return the proof's batch script."""
    types = {name.partition("_")[0] for name in site.mpi_types}
    launchers = [name for name in LAUNCHERS if not types or name in {"mpirun", *types}]
    if options.launcher is not None:
        first = "mpirun" if options.launcher is Launcher.MPIRUN else "pmix"
        launchers.sort(key=lambda name: name != first)
        launchers = launchers if options.other_launchers else [first]
    chosen = " ".join(options.modules)
    variants = [chosen]
    if options.others:
        variants = [chosen, "", *mpi_modules(site.modules)]
    elif not any(map(_MPI_MODULE.fullmatch, options.modules)):
        # The modules are for Python or Slurm.
        variants = [chosen, *(f"{chosen} {name}" for name in mpi_modules(site.modules))]
    variants = list(dict.fromkeys(variants))
    head = {"root": placed.folder, "slurm_path": site.slurm_path, "boot": BOOT}
    head["engines"] = " ".join(ENGINES)
    lines = ["#!/bin/bash", *(f"{name}={shlex.quote(value)}" for name, value in head.items())]
    lines += [f"launchers=({shlex.join(launchers)})", f"variants=({shlex.join(variants)})"]
    return "\n".join([*lines, _PROOF]).encode()


def mpi_modules(modules: Iterable[str]) -> list[str]:
    """Return the MPI modules to try: the newest version of each library first, then the second
    newest.
    """
    libraries: dict[str, list[str]] = {}
    for name in modules:
        if match := _MPI_MODULE.fullmatch(name):
            libraries.setdefault(match[2].lower(), []).append(name)

    def version(name: str) -> tuple[int, ...]:
        return _release(name.replace("x86_64", ""))

    newest_first = (sorted(names, key=version, reverse=True) for names in libraries.values())
    return [name for names in zip_longest(*newest_first) for name in names if name][:_MOST_MODULES]


def read_facts(lines: Iterable[str]) -> Proof | Unproven:
    """Parse the output of the proof's job. An invalid line does not affect the other lines."""
    rows: dict[str, list[list[str]]] = {}
    for line in lines:
        name, *words = (printable(word) for word in line.split("\t"))
        rows.setdefault(name, []).append(words)
    for name in ("refused", "pending"):
        if name in rows:
            why, expected_start = (*rows[name][0], "", "")[:2]
            return Unproven(name, why, expected_start=expected_start)
    nodes = _nodes(rows)
    trials, proven = _trials(rows)
    if proven is not None:
        modules, launcher, seconds, judged = proven
        return Proof(launcher, tuple(modules.split()), nodes, judged, seconds, trials)
    lost = "; ".join(": ".join(words) for words in rows.get("lost", ()))
    if nodes.not_shared:
        return Unproven("not-shared", lost or ", ".join(nodes.not_shared), nodes, trials)
    if nodes.names and not nodes.version:
        answers = (words for words in rows["node"] if words[1:2] == ["version"])
        return Unproven(
            "python", "; ".join(f"{words[0]}: {words[2]}" for words in answers), nodes, trials
        )
    if trials:
        return Unproven("mpi", trials[-1].failure, nodes, trials)
    output = " ".join(word for words in rows.get("output", ()) for word in words)
    return Unproven("ended", output or "the job ended, and printed nothing", nodes)


def _trials(
    rows: Mapping[str, Sequence[Sequence[str]]],
) -> tuple[tuple[Trial, ...], tuple[str, str, float, Mapping[str, Any]] | None]:
    """Return all trials, and modules, launcher, seconds and answer of the trial that worked."""
    trials = [
        Trial(*words) for words in rows.get("fails", ()) if len(words) == len(Trial.__slots__)
    ]
    for words in rows.get("works", ()):
        with suppress(ValueError, RecursionError):
            modules, launcher, seconds, answer = words
            judged = json.loads(answer)
            if isinstance(judged, dict) and judged.get("ok") is True and launcher in LAUNCHERS:
                return (*trials, Trial(modules, launcher, "")), (
                    modules,
                    launcher,
                    float(seconds),
                    judged,
                )
    return tuple(trials), None


def _nodes(rows: Mapping[str, Sequence[Sequence[str]]]) -> Nodes:
    names = tuple(rows["hosts"][0]) if "hosts" in rows else ()
    facts: dict[str, dict[str, list[str]]] = {name: {} for name in names}
    for words in rows.get("node", ()):
        with suppress(ValueError, KeyError):
            name, key, value = words
            facts[name].setdefault(key, []).append(value)

    def values(key: str) -> list[str]:
        return [facts[name].get(key, [""])[0] for name in names]

    versions = values("version")
    glibcs = [text for text in values("glibc") if text]
    internet = [words[0] for words in rows.get("internet", ()) if words]
    return Nodes(
        names,
        version=versions[0]
        if len({*versions}) == 1 and re.fullmatch(r"[\d.]+\w*", versions[0])
        else "",
        pythons=_common(facts[name].get("python", ()) for name in names),
        glibc=min(glibcs, key=_release) if glibcs else "",
        arch=next(iter({*values("arch")}), ""),
        internet="yes" in internet,
        gpus={name: tuple(facts[name]["gpu"]) for name in names if "gpu" in facts[name]},
        scratch=_scratch(facts[name].get("scratch", ()) for name in names),
        engines=_common(facts[name].get("engine", ()) for name in names),
        not_shared=tuple(name for name in names if facts[name].get("seen") != ["yes"]),
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def _common(programs: Iterable[Sequence[str]]) -> dict[str, str]:
    """Return program -> version of those that all nodes have in the same version."""
    each = [dict.fromkeys(line for line in lines if " " in line) for lines in programs]
    return dict(
        line.split(" ", 1)
        for line in (each[0] if each else ())
        if all(line in lines for lines in each)
    )


def _scratch(nodes: Iterable[Sequence[str]]) -> dict[str, tuple[str, int]]:
    """Return folder -> type of its file system and least free KiB, for folders that all nodes have
    on a file system of their own.
    """
    each: list[dict[str, tuple[str, int]]] = []
    for lines in nodes:
        found = (re.fullmatch(r"(\S+) (\S+) (\d+)", line) for line in lines)
        each.append({m[1]: (m[2], int(m[3])) for m in found if m and not _SHARED.match(m[2])})
    return {
        name: (kind, min(own[name][1] for own in each))
        for name, (kind, _) in (each[0].items() if each else ())
        if all(own.get(name, ("",))[0] == kind for own in each)
    }


def place_and_prove(
    transport: Transport, site: SiteDescription, folder: str, cluster_id: str, options: ProofOptions
) -> tuple[Placed, Proof | Unproven]:
    """Call ``place``, then ``prove``. If the nodes differ from the login node, do both again for
    the nodes.

    Raises the errors of both. UsageError: the nodes have no Python that jobs can use.
    """
    modules = options.modules
    report = options.reporter.note
    placed = place(
        transport, site, folder, cluster_id, python=options.python, modules=modules, report=report
    )
    outcome = prove(transport, site, placed, options)
    nodes = outcome.nodes
    if options.python is None:
        has_other = not placed.has_own_python or bool(usable_pythons(nodes.pythons))
    else:
        has_other = bool(nodes.pythons)
    if isinstance(outcome, Unproven) and outcome.code == "python" and has_other:
        # The site's login node has other software than its compute nodes.
        site = replace(
            site,
            pythons=nodes.pythons,
            glibc=nodes.glibc or site.glibc,
            arch=nodes.arch,
        )
        if options.python is None:
            site = with_standalone_python(transport, site, folder, cluster_id, report=report)
        placed = place(
            transport,
            site,
            folder,
            cluster_id,
            python=options.python,
            modules=modules,
            report=report,
        )
        outcome = prove(transport, site, placed, options)
    return placed, outcome


def leave_proof(
    transport: Transport, site: SiteDescription, placed: Placed, options: ProofOptions, nodes: int
) -> None:
    """Have the user's first job on ``nodes`` nodes or more run the proof before its program."""
    script = proof_script(site, placed, options)
    argv = ["sh", "-c", _LEAVE, "leave", placed.folder, str(nodes), str(len(script))]
    transport.run(argv, stdin=script + probe_texts())


def read_first_proof(transport: Transport, folder: str) -> tuple[str, Proof | Unproven] | None:
    """Return the id of the job that ran the proof, and the outcome. None: no job has run it."""
    result = transport.run(["sh", "-c", _READ, "read", folder], check=False)
    if result.rc:
        return None
    job_id, *lines = result.stdout.splitlines()
    outcome = read_facts(lines)
    if isinstance(outcome, Unproven) and "end" not in lines:
        outcome = replace(outcome, code="ended", why=f"job {job_id} did not finish the proof")
    return job_id, outcome
