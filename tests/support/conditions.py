"""The fixed conditions of a test run, whether a terminal, a background script, cron or CI started it.

Programs that a test starts inherit them. A test of other conditions sets these itself.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import pytest
from pytest_timeout import Settings, timeout_sigalrm

from tests.support.processes import descendants

_AGAIN_S = 30.0
_DEAF = 3  # times its limit
# Ignored by Python itself; subprocess puts them back.
_PYTHONS_OWN = {
    signal.SIGPIPE,
    signal.SIGXFSZ,
}
# What changes how a program writes, where it looks, or which cluster, cloud or job it believes to
# be in.
_FOREIGN = re.compile(
    r"LANG|LANGUAGE|LC_.*|TZ|TERM|COLORTERM|COLUMNS|LINES|(NO|FORCE|CLI|PY)_?COLOR.*|COMP_.*"
    r"|PYTHON.*|BASH_ENV|ENV|CDPATH|POSIXLY_CORRECT|XDG_(?!CACHE_HOME).*|CLUSTERCTL_.*"
    r"|(SLURM|SBATCH|SRUN|SQUEUE|SACCT|SINFO|OMPI|PMIX|PRTE|HYDRA|ANSIBLE|GOOGLE|GCE|TF_VAR)_.*"
    r"|TF_(LOG|DATA_DIR|WORKSPACE|INPUT|CLI_ARGS.*)|CLOUDSDK_(CONFIG|CORE_PROJECT|ACTIVE_CONFIG_NAME)"
    r"|OMP_.*|SSH_.*|RSYNC_.*|GIT_(DIR|WORK_TREE|INDEX_FILE|CONFIG.*)|CI|GITHUB_ACTIONS"
)


def settle() -> None:
    """Give this process, in which tests run, the conditions of a fresh login."""
    for number in signal.valid_signals() - _PYTHONS_OWN:
        # As SIGINT and SIGQUIT in a script's background.
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o022)
    for name in [name for name in os.environ if _FOREIGN.fullmatch(name)]:
        del os.environ[name]
    os.environ["LANG"] = "C.UTF-8"
    os.environ["PATH"] = _without_shims(os.environ["PATH"])
    sys.dont_write_bytecode = False  # assertions take longer to rewrite than all modules to import
    Limit.stderr = os.dup(2)  # before pytest captures it


def _without_shims(path: str) -> str:
    """Without the scripts by which pyenv and the like start a Python: ten times the work of its own
    start.
    """
    folders = [folder for folder in path.split(os.pathsep) if Path(folder).name != "shims"]
    rest = os.pathsep.join(folders)
    return rest if shutil.which("python3", path=rest) else path


class Limit:
    """The time limit of a test's setup, call and teardown, each by itself.

    pytest-timeout's own timer ends with the first exception, so that a test may catch it and a
    teardown has none, and it leaves running what the test waits for.
    """

    stderr = 2

    def __init__(self, item: pytest.Item, settings: Settings) -> None:
        self._item = item
        self._settings = settings
        self._before: set[int] = set()
        self._is_over = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Fail the body, again and again, once its time is over; and end the programs that it
        started.
        """
        self._before = set(descendants(os.getpid()))
        self._is_over = False
        signal.signal(signal.SIGALRM, self._over)
        signal.setitimer(signal.ITIMER_REAL, self._settings.timeout, _AGAIN_S)
        # Where Python hears no signal the process ends: pytest-xdist fails the test, and goes on in
        # another.
        faulthandler.dump_traceback_later(
            self._settings.timeout * _DEAF, exit=True, file=self.stderr
        )
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        if self._is_over:
            pytest.fail("the test went on after its time limit, and caught what was to end it")

    def _over(self, *_: object) -> None:
        __tracebackhide__ = True
        self._is_over = True
        try:
            timeout_sigalrm(self._item, self._settings)  # shows all stacks, and fails
        finally:
            for pid in set(descendants(os.getpid())) - self._before:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


SETTING = Path("/proc/sys/kernel/sched_autogroup_enabled")
# The setting before the first of the runs that changed it, each of which holds a lock. After a run
# that was killed the next one puts it back. A reboot forgets both.
RECORD = Path("/run/clusterctl-tests-autogroup")


@contextmanager
def without_autogroup(setting: Path = SETTING, record: Path = RECORD) -> Iterator[None]:
    """Schedule each process by itself, not by its session, where we may; afterwards as it was.

    Linux 6.18 gives a session all of a CPU for minutes, as long as its threads there wake each
    other and it
    has a process on another CPU too: a training does that. All others on the CPU wait, even the
    kernel's own threads (mounts, namespaces), so that nodes neither boot nor answer. See
    docs/local.md; labs of somebody's own machines, which no local cluster is on, need it here.
    """
    file = None
    with suppress(OSError):  # none of this kernel's, or not ours to write
        now = setting.read_text().strip()
        file = _shared(record)
        if now != "0":  # else it is for a cluster or another run to put back
            setting.write_text("0")
            file.write(now)
            file.flush()
    try:
        yield
    finally:
        if file is not None:
            with suppress(OSError), file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while another run needs it
                if before := record.read_text():
                    setting.write_text(before[0])
                record.unlink()


def _shared(record: Path) -> TextIO:
    """The record, locked together with other runs."""
    while True:
        file = record.open("a")
        fcntl.flock(file, fcntl.LOCK_SH)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # the last run before us ended, and removed it
