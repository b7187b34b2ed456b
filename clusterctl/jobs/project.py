"""The project of a user's script: the folder sent with it, and the folder where it starts."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from clusterctl.errors import UsageError, excluded
from clusterctl.spec.job import JobSpec, Project
from clusterctl.spec.program import absolute_path, import_roots, is_project, module_root


def with_project(job: JobSpec, here: Path) -> JobSpec:
    """Return the job with its project. ``here``: the folder in which the user starts the program.

    Raises UsageError if the option --folder names no folder that contains the script, or a module's
    package can't be sent.
    """
    if job.script is None or job.folder is False:
        if job.run_module is not None:
            raise excluded("-m", "--folder none")
        return job
    here = absolute_path(here)
    # A module is started from the folder of its outermost package.
    top = job.script.parent if job.run_module is None else module_root(job.run_module, job.script)
    if isinstance(job.folder, Path):
        folder = _chosen_folder(job.folder, job.script)
    else:
        folders = _folders(job.script)
        above = folders[folders.index(top) :] if top in folders else folders
        folder = next(filter(is_project, above), above[0])
    if not top.resolve().is_relative_to(folder.resolve()):
        raise UsageError(
            f"the module {job.run_module} can't be sent with the job",
            code="files-unfit",
            about="module",
            where=str(top),
            why=project_obstacle(top) or f"only {folder} would be sent",
            fix="move the project into a separate folder without symbolic links, or select it "
            "with --folder",
        )
    script = os.path.relpath(job.script, folder)
    if script.startswith("../"):
        script = os.path.relpath(job.script.parent.resolve() / job.script.name, folder.resolve())
    if job.run_module is None:
        roots = _roots(folder, top)
    else:
        roots = [os.path.relpath(top.resolve(), folder.resolve()), *_roots(folder, None)]
    project = Project(folder, script, _start(folder, here), tuple(dict.fromkeys(roots)))
    return job.model_copy(update={"project": project})


def _roots(folder: Path, script_folder: Path | None) -> list[str]:
    """Return the paths below ``folder`` of the folders from which programs import its packages.

    script_folder: left out, because Python searches it anyway.
    """
    if project_obstacle(folder):
        return []
    roots = (root for root in import_roots(folder) if root != script_folder)
    return [os.path.relpath(root, folder) for root in roots if os.path.isdir(root)]


def folder_project(folder: Path) -> Project:
    """Return the project of a folder sent without a script, for `clusterctl shell --folder`.

    Raises UsageError if the folder does not exist or can't be sent.
    """
    folder = _chosen_folder(folder, folder / "script")
    return Project(folder, ".", _start(folder, Path.cwd()), tuple(_roots(folder, None)))


def _start(folder: Path, here: Path) -> str:
    """Return the path below ``folder`` of the folder in which the program starts: ``here`` if it is
    sent.
    """
    # A path through a symbolic link would lead to the link, not to the folder.
    inner = here.resolve()
    outer = folder.resolve()
    is_sent = inner.is_relative_to(outer) and not project_obstacle(folder)
    return os.path.relpath(inner, outer) if is_sent else "."


def project_obstacle(folder: Path) -> str:
    """Return why a folder must not be sent, such as "your home folder"; "" if it can be sent."""
    if folder == folder.parent:
        return "the root of the file system"
    # Unlike Path.home, this never raises.
    home = Path(os.path.expanduser("~"))
    if folder.resolve() == home.resolve():
        return "your home folder"
    if folder.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH | stat.S_ISVTX:
        return "a folder that all users share"
    return ""


def _chosen_folder(folder: Path, script: Path) -> Path:
    folder = absolute_path(folder)
    # Unlike Path.is_dir, this never raises.
    problem = project_obstacle(folder) if os.path.isdir(folder) else "it is not a folder"
    if not problem and not script.parent.resolve().is_relative_to(folder.resolve()):
        problem = f"the script {script} does not lie in it"
    if problem:
        raise UsageError(
            f"--folder {folder} can't be sent with the job",
            code="files-unfit",
            about="folder",
            why=problem,
            fix="name the folder of a project; for a job it must contain the script",
        )
    return folder


def _folders(script: Path) -> list[Path]:
    """Return the folders that can be sent with a script, from its own up; only its own if it can't."""
    folders = []
    for folder in script.parents:
        if project_obstacle(folder):
            break
        folders.append(folder)
        # The script is not sent from behind a link.
        if folder.is_symlink():
            break
    return folders or [script.parent]
