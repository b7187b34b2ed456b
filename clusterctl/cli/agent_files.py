"""The files of this machine that a `submit` of an agent would send."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from clusterctl.cli.agent_arguments import Folders, require_folders_of_job_file
from clusterctl.errors import ClusterctlError
from clusterctl.spec.agent import AgentLimits

# Options that choose the files to send.
_CHOOSING: Final = ("include", "exclude", "folder")


def require_files(arguments: Mapping[str, Any], folders: Folders, limits: AgentLimits) -> None:
    """Raise LimitError if a job would read or send files outside of the folders.

    A job file may name such files, and a link in the project may lead to one. Other errors are
    left to the command.
    """
    from clusterctl.jobs.prepare import read_jobs
    from clusterctl.jobs.source import source_of
    from clusterctl.spec.program import MODULE_FLAG, is_job_file

    target = str(arguments.get("target", ""))
    if module := arguments.get("m"):
        target = f"{MODULE_FLAG}{module}"
    elif is_job_file(target):
        _require_files_of_job_file(folders.project / target, folders, limits)
    given = {name: arguments[name] for name in _CHOOSING if name in arguments}
    if arguments.get("no_folder"):
        given["folder"] = False
    paths: list[Path] = []
    with suppress(ClusterctlError, OSError):
        for job in read_jobs(target, given, arguments.get("variant", ())):
            if job.script is None:
                continue
            paths += [job.script, *([job.place.folder] if job.project else [])]
            source = source_of(job)
            paths += [item.origin for item in source.files] if source is not None else []
    for path in paths:
        folders.require(str(path))


def _require_files_of_job_file(path: Path, folders: Folders, limits: AgentLimits) -> None:
    from clusterctl.spec.job_file import JOB_FILE
    from clusterctl.spec.parse import Document, read_text

    try:
        values = Document(read_text(path, JOB_FILE), str(path), JOB_FILE).values
    except ClusterctlError:
        return
    require_folders_of_job_file(values, path.parent, folders, limits)
