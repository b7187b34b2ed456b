"""The folders in the job user's folder of clusterctl on a cluster, beside which there are few small
files. Also sent to hosts, so it is for Python 3.9.
"""

from __future__ import annotations

from typing import NamedTuple

ENV = "env"
ENVIRONMENTS = "environments"
PYTHONS = "pythons"
STORE = "store"
BUILDS = "builds"
IMAGES = "images"
SECRETS = "secrets"
MPIRUN = "mpirun"
JOBS = "jobs"
RUNS = "runs"
FILES = "files"


class RemoteFolder(NamedTuple):
    """A folder that clusterctl creates.

    what: its content. noun: for an entry, if `status` counts the entries. Empty: it does not.
    entries: arguments of `find` in it that select the counted entries. Names with a dot in front
        are never counted: they are incomplete, or locks.
    has_user_files: whether its files may be a user's only copies.
    is_own, is_attached: whether it is on clusters that `up` configures, and on attached ones.
    is_made_by_attach: whether `attach` creates it.
    """

    name: str
    what: str
    noun: str = ""
    entries: str = "-mindepth 1 -maxdepth 1"
    has_user_files: bool = False
    is_own: bool = True
    is_attached: bool = True
    is_made_by_attach: bool = False


FOLDERS = (
    RemoteFolder(ENV, "the Python of jobs", is_own=False, is_made_by_attach=True),
    RemoteFolder(
        PYTHONS,
        "Python, which the site lacks",
        "Python",
        is_own=False,
        is_made_by_attach=True,
    ),
    RemoteFolder(
        ENVIRONMENTS,
        "Python environments",
        "environment",
        # Links lead to the complete environments.
        "-mindepth 1 -maxdepth 1 -type l",
        is_made_by_attach=True,
    ),
    RemoteFolder(BUILDS, "results of `submit --build`", "build"),
    RemoteFolder(IMAGES, "container images, as engines run them", "container image"),
    RemoteFolder(
        STORE,
        "files that jobs share, and clusterctl's programs",
        "sent file",
        # Below folders with the first two digits of their hash.
        "-mindepth 2 -maxdepth 2 -type f -path */??/*",
        is_made_by_attach=True,
    ),
    RemoteFolder(SECRETS, "values of `submit --secret` for running jobs"),
    RemoteFolder(MPIRUN, "records of jobs without a scheduler", is_attached=False),
    RemoteFolder(JOBS, "folders of jobs", has_user_files=True),
    RemoteFolder(RUNS, "runs that were sent there", has_user_files=True),
    RemoteFolder(FILES, "files that you have put there", has_user_files=True),
)
