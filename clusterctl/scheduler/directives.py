"""The #SBATCH lines of a user's script, and the options in them that flags of `submit` replace."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

from clusterctl.errors import UsageError
from clusterctl.scheduler.slurm_parse import expand_nodes
from clusterctl.spec.job import JobSpec
from clusterctl.spec.sbatch import Request, quoted, requests, requests_of, split_words

_MARK: Final = "#SBATCH"
_HETEROGENEOUS: Final = re.compile(r"#SBATCH\s+(hetjob|packjob)\b")
# Together they are the number of tasks.
_SHAPE: Final = frozenset({"nodes", "tasks_per_node"})
_SETS_SHAPE: Final = frozenset({"nodes", "ntasks-per-node", "tasks-per-node"})
# Options without an effect on jobs without GPUs.
_OF_GPUS: Final = frozenset({"--gpu-bind", "--gpu-freq"})


@dataclass(frozen=True, slots=True)
class Directives:
    """The #SBATCH lines of a script.

    script: the file's name. lines: the lines, verbatim. requests: the options in them.
    """

    script: str
    lines: tuple[str, ...] = ()
    requests: tuple[Request, ...] = ()

    @classmethod
    def read(cls, path: Path, lines: Sequence[str]) -> Directives:
        """Read the #SBATCH lines before a script's first command, as sbatch does.

        Raises:
            UsageError: the script asks for a heterogeneous job, or a line can't be read.
        """
        texts: dict[int, str] = {}
        for number, line in enumerate(lines, start=1):
            if line.strip() and not line.lstrip().startswith("#"):
                break
            if _HETEROGENEOUS.match(line):
                raise UsageError(
                    f"the script {path} asks for a heterogeneous job, which clusterctl can't submit",
                    code="heterogeneous-job",
                    fix="submit the script with `sbatch` on the cluster (`clusterctl ssh`)",
                )
            if line.startswith(_MARK):
                texts[number] = line.encode(errors="surrogateescape").decode(errors="replace")
        words = [(number, word) for number, line in texts.items() for word in _words(path, number, line)]
        return cls(path.name, tuple(texts.values()), tuple(requests(words)))

    def last(self, name: str) -> Request | None:
        """Return the last option with this name, which is the option that sbatch uses."""
        return next((r for r in reversed(self.requests) if r.option and r.option.name == name), None)

    def without_replaced(self, job: JobSpec) -> tuple[str, ...]:
        """Return the lines without the options that speak of a quantity which the job's flags set.

        Raises:
            UsageError: a line contradicts the flags, or is not an option of a job.
        """
        replaced = self._replaced(job)
        kept = [new for request in self.requests if (new := request.without(replaced))]
        for request in kept:
            if contradiction := _contradiction(job, request):
                problem, fix = contradiction
                place = f"`#SBATCH {request}` in line {request.line} of {self.script}"
                raise UsageError(f"{place} {problem}", code="directive-refused", fix=fix)
        if kept == list(self.requests):
            return self.lines
        lines = (group for _, group in groupby(kept, key=lambda request: request.line))
        return tuple(f"{_MARK} {' '.join(quoted(str(request)) for request in line)}" for line in lines)

    def _replaced(self, job: JobSpec) -> frozenset[str]:
        """Return the quantities that the job's flags set."""
        given = {*job.model_fields_set, "ours"}
        for request in requests_of(job.slurm):
            given |= {*request.quantities, request.own_name}
        shape = {r.option.sets for r in self.requests if r.option and r.option.name in _SETS_SHAPE}
        if given & _SHAPE and given | shape >= _SHAPE:
            given.add("tasks")
        return frozenset(given | (_OF_GPUS if "gpus" in given and not job.gpus else set()))


def _contradiction(job: JobSpec, request: Request) -> tuple[str, str] | None:
    """Return the problem and the fix if an option of the script contradicts the job's flags, or None."""
    name, sets = request.own_name, request.option.sets if request.option else ""
    flags, value = job.model_fields_set, request.value or ""
    if sets == "never":
        advice = f", and use `clusterctl submit {request.use}`" if request.use else ""
        return "is not an option of a job", f"leave it out of the script{advice}"
    if name == "--ntasks":
        for field, least in (("nodes", job.nodes), ("tasks_per_node", job.tasks_per_node)):
            flag, other = (f"--{text.replace('_', '-')}" for text in (field, *(_SHAPE - {field})))
            if field in flags and value.isdecimal() and int(value) < least:
                problem = f"asks for fewer tasks in total than {flag} {least}"
                return problem, f"also pass {other}, which replaces --ntasks"
    count = _count_nodes(value) if name == "--nodelist" else 0
    if "nodes" in flags and count > job.nodes:
        fix = f"use --nodes {count}, or name other nodes with --slurm --nodelist=NODES"
        return f"names more nodes than --nodes {job.nodes}", fix
    if any(name == given.own_name for given in requests_of(job.slurm)):
        return (f"can't be combined with --slurm {name}", "leave out either, or pass --gpus or --cpus")
    if sets and "gpu" in name and "gpus" in flags and not job.gpus:
        return "needs GPUs, and --gpus is 0", f"replace it with --{sets.replace('_', '-')}"
    return None


def _count_nodes(names: str) -> int:
    with suppress(ValueError):
        return len(expand_nodes(names))
    return 0


def _words(path: Path, number: int, line: str) -> Iterator[str]:
    try:
        yield from split_words(line.removeprefix(_MARK))
    except ValueError as exc:
        raise UsageError(
            f"line {number} of {path.name} can't be read: {exc}",
            code="directive-refused",
            why=line,
            fix="correct the line",
        ) from exc
