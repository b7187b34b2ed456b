"""The files of this machine that a call of an agent would read or send, beside those that its
arguments name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from clusterctl.cli.agent_arguments import (
    Folders,
    require_folders_of_job_file,
    require_variable,
)
from clusterctl.cli.agent_tools import read_words
from clusterctl.errors import UsageError
from clusterctl.spec.agent import AgentLimits
from clusterctl.spec.job import JobSpec
from clusterctl.spec.load import read_spec
from clusterctl.spec.names import SPEC_NAME

# The commands that read the list of packages that a spec file names.
_READ_PACKAGES: Final = frozenset({"validate", "plan", "up", "submit", "replay", "where"})


def require_files_of_spec(
    verb: str, arguments: Mapping[str, Any], folders: Folders, limits: AgentLimits
) -> None:
    """Raise LimitError if the spec file of a call names a list of packages outside of the folders,
    or the list such files.
    """
    if verb not in _READ_PACKAGES or "cluster" in arguments:
        return
    try:
        spec = read_spec(folders.project / arguments.get("file", SPEC_NAME))
    except UsageError:
        # The command itself reports it.
        return
    if (packages := spec.software.python.requirements) is not None:
        folders.require(str(packages))
        require_packages(packages, folders, limits)


def require_files(verb: str, words: Sequence[str], folders: Folders, limits: AgentLimits) -> None:
    """Raise LimitError if a job would read or send files outside of the folders.

    A job file may name such files, a list of packages may include them, and a link in the project
    may lead to one. The job is read from the words of the command, as the command reads it.

    Raises the error of the command if the job can't be read.
    """
    from clusterctl.jobs.prepare import reads_packages_beside
    from clusterctl.jobs.source import source_of
    from clusterctl.packages.package_files import find_package_file
    from clusterctl.scheduler.request import Request

    for job in _jobs(verb, words, folders, limits):
        if job.script is None:
            continue
        source = source_of(Request.read(job))
        for path in (
            job.script,
            *([job.place.folder] if job.project else []),
            *(item.origin for item in (source.files if source is not None else ())),
        ):
            folders.require(str(path))
        packages = job.requirements or None
        if reads_packages_beside(job):
            packages = find_package_file(job.script, job.place.folder)
        if packages is not None:
            require_packages(packages, folders, limits)


def _jobs(
    verb: str, words: Sequence[str], folders: Folders, limits: AgentLimits
) -> Sequence[JobSpec]:
    """Return the jobs that a command is about, by its words after the name."""
    from clusterctl.cli.submit import job_and_options
    from clusterctl.jobs.prepare import read_jobs
    from clusterctl.spec.program import is_job_file

    read = read_words(verb, words)
    if read is None:
        return ()
    params, given = read
    target, options = job_and_options(params["target"] or "", params.get("args") or [], given)
    if is_job_file(target):
        _require_files_of_job_file(folders.project / target, folders, limits)
    return read_jobs(target, options, params["variant"] or ())


def _require_files_of_job_file(path: Path, folders: Folders, limits: AgentLimits) -> None:
    from clusterctl.spec.job_file import JOB_FILE
    from clusterctl.spec.parse import Document, read_text

    values = Document(read_text(path, JOB_FILE), str(path), JOB_FILE).values
    require_folders_of_job_file(values, path.parent, folders, limits)


def require_packages(choice: Path, folders: Folders, limits: AgentLimits) -> None:
    """Raise LimitError if a list of packages names files outside of the folders, or values of the
    user's, which pip inserts for ${NAME}.

    choice: as the user chose it, with extras and groups.
    """
    from clusterctl.packages.named_files import named_in

    for named in named_in(choice):
        if isinstance(named, str):
            require_variable(named, limits)
        else:
            folders.require(str(named))
