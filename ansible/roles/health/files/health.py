#!/usr/bin/python3 -IS
"""Checks what this node needs to run jobs. Slurm, slurmd's unit, `clusterctl doctor` and `up` call
this program, and check nothing of that themselves.

    health         Slurm's HealthCheckProgram: drains this node when it is unhealthy, and resumes it
                   when it is healthy again. Without Slurm, clusterctl runs it before each job.
    health job     For Slurm's Prolog: drains this node if a job could not start here. The exit
                   code is then 3, and the job returns to the queue. Runs only the quick checks.
    health boot    Before slurmd starts: waits until the quick checks pass, at most ``BOOT_S``
                   seconds, and repairs what it can.
    health report  Prints the problems as a JSON list, and changes nothing.

A need is an entry of `needs` in the JSON file of settings: the name of a check, its parameters, and
the code and the fix of its problems. It comes from the meta/touches.yml of the role that provides
what is needed.

An unhealthy node is drained with a reason that begins with `clusterctl health:`. Its jobs run to
their end, and once the node is healthy it is resumed. A node drained by a person is neither
resumed nor repaired. If a person resumes the node, it is not drained again for the same fault in
the kernel's log, nor for the link of a card that is now idle. The exit code is 1 if the node is
unhealthy. Runs as root with the platform's Python, from 3.9 on. Each job and each `clusterctl status`
waits for it, so it imports no slow module, such as dataclasses.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TextIO

CONFIG = Path("/opt/clusterctl/health.json")
# A reboot clears this file, like the kernel's log.
STATE = Path("/run/clusterctl-health.json")
# It exists if the Prolog has drained the node since the last check.
STOPPED_A_JOB = Path("/run/clusterctl-health.stopped")
# Only one process at a time checks and repairs.
LOCK = Path("/run/clusterctl-health.lock")
PREFIX = "clusterctl health: "
# Slurm's reason if a Prolog fails and the node is not drained yet.
OF_PROLOG = "Prolog error"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MOUNTS = Path("/proc/self/mounts")
FABRIC = Path("/sys")
# Timeouts of programs. slurmd kills a check after 60 s, so that all checks together have less, and
# the calls of Slurm afterwards have the rest.
DRIVER_S = 20
FOLDER_S = 15
# Until slurmd has fetched its configuration.
START_S = 5
SHORT_S = 8
UNFIT_FOR_JOB = 3
END_S = 0.2
CHECKS_S = 44
REPORT_S = 35
BOOT_S = 60
LONGEST_PAUSE_S = 8
LONGEST_REASON = 240
# A drained GPU must cool down to so many degrees below its limit, so that the node does not flap.
COOLED_C = 5

FIELDS = (
    "index driver_version temperature.gpu ecc.errors.uncorrected.volatile.total "
    "pcie.link.width.current pcie.link.width.max pcie.link.gen.gpucurrent pcie.link.gen.max "
    "pstate compute_mode clocks_event_reasons.active mig.mode.current mig.mode.pending "
    "retired_pages.pending remapped_rows.pending remapped_rows.failure fabric.state "
    "fabric.status"
).split()
# Names of fields before driver 535.
OLD_NAMES = {
    "clocks_event_reasons.active": "clocks_throttle_reasons.active",
    "pcie.link.gen.gpucurrent": "pcie.link.gen.current",
}
# Before driver 570, only the option --query-remapped-rows knows these fields.
REMAPPED_ROWS = ("remapped_rows.pending", "remapped_rows.failure")
YES = {"Yes", "1"}
NOT_AVAILABLE = "[N/A]"
UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field')
# The text in the cells of a card that does not respond.
LOST = re.compile(r"\[(GPU [\w ]+)\]")
MANAGER = re.compile(r"Fabric Manager version is\s*:\s*(\S+)")
# The state of a fabric that is ready -> its status.
LINKED = {"Completed": "Success"}
NO_FABRIC = {"N/A", "Not Supported"}
SLOWED = {0x08: "hardware slowdown", 0x40: "too hot, as the hardware reports", 0x80: "power brake"}
# Some drivers write these lines instead of an XID if a card has fallen off the bus.
FALLEN = re.compile(
    r"^\[\s*(?P<at>\d+\.\d+)\] NVRM: The NVIDIA GPU (?P<where>\S+)\n.*NVRM: .*\n.*NVRM: fallen "
    r"off the bus",
    re.MULTILINE,
)
FALLEN_XID = 79
XID = re.compile(r"^\[\s*(?P<at>\d+\.\d+)\] .*NVRM: Xid \((?P<where>[^)]*)\): (?P<number>\d+)")
NOBODY = 65534  # on Linux, the kernel's overflowuid
SHARED_MEMORY = "/dev/shm"  # noqa: S108
UNIT_PROPERTIES = "ActiveState,NRestarts,ActiveEnterTimestampMonotonic"
# Positions of fields in the output of `chronyc -c tracking`.
CHRONY_OFFSET = 4
CHRONY_LEAP = 13
# Colons of a line of passwd before the home folder.
PASSWD_COLONS = 5
# dpkg's lists of the files of packages, and the links that it makes to some of them.
DPKG = ("/var/lib/dpkg/info/{}.list", "/var/lib/dpkg/alternatives/{}")
RPM_FILES = r"[%{=NAME}\t%{FILEFLAGS:fflags}\t%{FILENAMES}\n]"
# rpm's flags of documents, settings, and files that need not exist.
OPTIONAL = set("dcgm")
# Documents, headers, settings and state.
NOT_NEEDED = ("/usr/share/", "/usr/include/", "/etc/", "/var/", "/run/")
UCX_DEVICES = re.compile(r"UCX_NET_DEVICES=([^\s'\"]+)")
# The code of a check that could not look.
NOT_LOOKED = "not-looked-at"
FATAL = re.compile(r"\bfatal: (.*)")

# The settings of this node, with the parameters of the need that is checked.
Settings = dict[str, Any]


class Problem:
    """A problem of the node.

    lasting: ignored before a job, and unless two consecutive checks find it.
    past: whether an earlier check found it.
    code, what, fix: those of the need that is not met.
    """

    def __init__(self, text: str, *, lasting: bool = False, past: bool = False) -> None:
        self.text = text
        self.lasting = lasting
        self.past = past
        self.code = self.what = self.fix = ""


class NotLookedError(Exception):
    """A check could not look, so that it is not known whether its need is met. The text says why."""


class State:
    """Values that this program stores for its next run.

    drained: whether this program drained the node, if known. seen: problems of the last check.
    xid, drained_xid, known_xid: times in the kernel's log of the newest GPU fault: now, when the
    node was drained, and when a person resumed the node.
    links: problems of PCIe links.
    hanging: what does not answer -> pid of the process that waits for it and can't be killed.
    gone: fields of nvidia-smi that the driver does not know.
    """

    def __init__(self) -> None:
        self.drained: bool | None = None
        self.seen: list[str] = []
        self.xid = -1.0
        self.drained_xid = -1.0
        self.known_xid = -1.0
        self.links: list[str] = []
        self.hanging: dict[str, int] = {}
        self.gone: list[str] = []

    @classmethod
    def read(cls) -> State:
        state = cls()
        with suppress(OSError, ValueError):
            stored = json.loads(STATE.read_text())
            # Otherwise another version has written it.
            if isinstance(stored, dict) and stored.keys() <= state.__dict__.keys():
                state.__dict__.update(stored)
        return state

    def hangs(self, name: str) -> bool:
        """Return whether the process that waits for ``name`` still exists."""
        return Path(f"/proc/{self.hanging.get(name, 0)}").exists()

    def note_hang(self, name: str, answer: Answer) -> bool:
        """Remember the process that waits for ``name``, if it did not end. Return whether it did
        not.
        """
        self.hanging.pop(name, None)
        if answer.rc is None:
            self.hanging[name] = answer.pid
        return answer.rc is None

    def write(self) -> None:
        fresh = STATE.with_name(f"{STATE.name}.{os.getpid()}")
        fresh.write_text(json.dumps(self.__dict__))
        fresh.replace(STATE)


class Answer(NamedTuple):
    """Result of a program. ``rc``: exit status; None after a timeout, 127 if the program does not
    exist.
    """

    rc: int | None
    text: str
    pid: int = 0


def ask(*argv: str, seconds: float = SHORT_S, uid: int | None = None) -> Answer:
    """Run a program. After a timeout, kill it without waiting for its end: it may hang in the
    driver, or at a file server.

    uid: the user and the group to run it as. Default: root.
    """
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True, env={"PATH": PATH, "LC_ALL": "C"}, cwd="/",
            user=uid, group=uid, extra_groups=None if uid is None else [],
        )  # fmt: skip
    except OSError as exc:
        return Answer(127, str(exc))
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        return Answer(None, "", process.pid)
    return Answer(process.returncode, text.strip())


def folder(need: Settings, state: State) -> Iterator[Problem]:
    """Check that the shared folder is there and answers. `mark`: a folder in it that only this
    cluster's has. `mount`: the path at which it is mounted; "" if it is no mount.
    """
    mark = need["mark"]
    mount = need["mount"]
    name = f"the shared folder {mount}".rstrip()
    if state.hangs("folder"):
        yield Problem(f"{name} still does not answer")
        return
    answer = ask("stat", "--format=%F", mark, seconds=FOLDER_S)
    if state.note_hang("folder", answer):
        yield Problem(f"{name} does not answer within {FOLDER_S} s")
    elif answer.rc:
        error = answer.text.rpartition(": ")[2]
        if mount and not is_mounted(mount):
            yield Problem(f"{name} is not mounted")
        elif error == "No such file or directory":
            yield Problem(f"{mark} is missing")
        else:
            yield Problem(f"{name}: {error}")


def is_mounted(path: str) -> bool:
    """Return whether a file system is mounted at a path or, below the root, at a folder above
    it.
    """
    points = {line.split()[1] for line in MOUNTS.read_text().splitlines()}
    below_root = [Path(path), *list(Path(path).parents)[:-1]]
    return not points.isdisjoint(map(str, below_root))


def mount_folder(need: Settings, _: State) -> str | None:
    """Mount the shared folder if it is listed in /etc/fstab, and nothing mounts it already."""
    mount = need["mount"]
    if not mount or is_mounted(mount) or ask("findmnt", "--fstab", "--mountpoint", mount).rc:
        return None
    unit = ask("systemd-escape", "--path", "--suffix=mount", mount).text
    shown = ask("systemctl", "show", "--property=LoadState,ActiveState", unit).text
    if "=activating" in shown:
        return "the mount has not ended yet"
    if "=not-found" in shown:
        # systemd has not read /etc/fstab since it was changed.
        ask("systemctl", "daemon-reload")
    # Not by mount(8): the process of a file system in user space (sshfs, GlusterFS) would end with
    # the unit that runs this check.
    answer = ask("systemctl", "start", unit, seconds=FOLDER_S)
    if answer.rc is None:
        return f"the file server does not answer within {FOLDER_S} s"
    journal = (
        "journalctl",
        f"--unit={unit}",
        "SYSLOG_IDENTIFIER=mount",
        "--output=cat",
        "--lines=1",
    )
    return (ask(*journal).text or answer.text or f"exit code {answer.rc}") if answer.rc else ""


def packages(need: Settings, _: State) -> Iterator[Problem]:
    """Check that packages have all their files. `packages`: patterns of the packages' names.

    Raise NotLookedError if the package manager does not know the files.
    """
    lost: dict[str, list[str]] = {}
    for name, path in package_files(need["packages"]):
        if not path.startswith(NOT_NEEDED) and not os.path.lexists(path):
            lost.setdefault(name, []).append(path)
    for name, paths in lost.items():
        more = f" and {len(paths) - 1} more" if paths[1:] else ""
        yield Problem(f"the package {name} lacks {paths[0]}{more}")


def package_files(patterns: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, path) for each file of the installed packages with these names."""
    lists = [path for text in DPKG for name in patterns for path in glob.glob(text.format(name))]
    for file in map(Path, lists):
        lines = file.read_text().splitlines()
        name = file.name.partition(":")[0].removesuffix(".list")
        yield from ((name, path) for path in lines if path.startswith("/"))
    if not lists:
        answer = ask("rpm", "--query", "--all", f"--queryformat={RPM_FILES}", *patterns)
        rows = [line.split("\t") for line in answer.text.splitlines() if line.count("\t") > 1]
        if answer.rc is None:
            raise NotLookedError(f"rpm does not end within {SHORT_S} s")
        if answer.rc or not rows:
            raise NotLookedError(f"rpm names no files: {answer.text[:120] or 'no such package'}")
        for name, flags, path in rows:
            if not OPTIONAL & {*flags}:
                yield name, path


def python(need: Settings, _: State) -> Iterator[Problem]:
    """Check that users can run the jobs' Python. `accounts`: name -> uid; without users, nothing is
    checked.
    """
    program = need["python"]
    if not need["accounts"]:
        return
    # A user of jobs would be wrong: the epilog kills the processes of a user whose last job has
    # ended, and keeps the user's files in memory while such a process exists.
    answer = ask(program, "-I", "-c", "import mpi4py", uid=NOBODY)
    if answer.rc is None:
        # The first time after a boot, a busy disk may be as slow.
        yield Problem(f"{program} does not end within {SHORT_S} s", lasting=True)
    elif answer.rc:
        error = (answer.text.splitlines() or [f"exit code {answer.rc}"])[-1]
        yield Problem(f"{program} does not run for users: {error[:120]}")


def accounts(need: Settings, _: State) -> Iterator[Problem]:
    """Check the uids of the job users. `accounts`: name -> uid."""
    rows = passwd(need)
    if rows is None:
        yield Problem(f"the accounts of users are not known within {SHORT_S} s (getent passwd)")
        return
    uids = {row[0]: row[2] for row in rows}
    for name, uid in need["accounts"].items():
        if name not in uids:
            yield Problem(f"the account {name} is missing")
        elif uids[name] != str(uid):
            yield Problem(f"the account {name} has uid {uids[name]} instead of {uid}")


def homes(need: Settings, _: State) -> Iterator[Problem]:
    """Check that the homes of the job users are there. `accounts`: name -> uid."""
    user_of = {row[PASSWD_COLONS]: row[0] for row in passwd(need) or ()}
    # Another file system than the shared folder may hang, too.
    answer = ask("stat", "--format=", *user_of, *(os.path.dirname(home) for home in user_of))
    for home, user in user_of.items():
        missing = [
            f"'{path}': No such file" in answer.text for path in (home, os.path.dirname(home))
        ]
        # Without the folder of homes, another check names the cause.
        if missing == [True, False]:
            yield Problem(f"{home}, the home of {user}, is missing")


def writable(need: Settings, state: State) -> Iterator[Problem]:
    """Check that users can write where jobs do. `folders`: of all users. `homes`: the folder of homes,
    of which the first that exists is tried. `accounts`: name -> uid.
    """
    homes = ((f"{need['homes']}/{name}", uid) for name, uid in need["accounts"].items())
    tried = [(folder, NOBODY) for folder in need["folders"]]
    tried += [home for home in homes if not state.hangs("folder") and os.path.isdir(home[0])][:1]
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write_end, "\n".join(filter(None, (write_error(*one) for one in tried))).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as said:
        if not select.select([said], [], [], FOLDER_S)[0]:
            state.note_hang("writable", Answer(None, "", pid))
            raise NotLookedError(f"no write ended within {FOLDER_S} s")
        text = said.read().decode()
    os.waitpid(pid, 0)
    yield from map(Problem, text.splitlines())


def write_error(folder: str, uid: int) -> str:
    """Write a file as a user, and remove it. Return the error. "": none, or no space, which is another
    check's.

    Only the file system sees the user. The epilog would kill a process of the user.
    """
    import ctypes  # noqa: PLC0415 - a slow import, which only this process needs

    libc = ctypes.CDLL(None)
    libc.setfsgid(uid)
    libc.setfsuid(uid)
    path = f"{folder}/.clusterctl-{os.uname().nodename}-{os.getpid()}"
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write("x")
        os.unlink(path)
    except OSError as exc:
        if exc.errno not in {errno.ENOSPC, errno.EDQUOT}:
            return f"users can't write to {folder}: {exc.strerror}"
    finally:
        libc.setfsuid(0)
        libc.setfsgid(0)
    return ""


def passwd(need: Settings) -> list[list[str]] | None:
    """Return the fields of each job user that has an account. None: no answer in time."""
    # Without a name, getent lists all accounts.
    answer = ask("getent", "passwd", *need["accounts"]) if need["accounts"] else Answer(0, "")
    lines = [line.split(":") for line in answer.text.splitlines()]
    return None if answer.rc is None else [row for row in lines if len(row) > PASSWD_COLONS]


def devices(need: Settings, _: State) -> Iterator[Problem]:
    """Check that the device files of GPUs exist that gres.conf names."""
    files = need.get("gpus", {}).get("files", ())
    missing = [path for path in files if not Path(path).exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        hint = "; MIG devices are gone after a reboot" if "nvidia-caps" in missing[0] else ""
        yield Problem(f"{missing[0]}{more} of gres.conf is missing{hint}")


def open_devices(_: Settings, state: State) -> str:
    """Create the device files of all cards: the driver does so when its first client opens them."""
    if not state.hangs("driver"):
        state.note_hang("driver", ask("nvidia-smi", "--list-gpus", seconds=DRIVER_S))
    return ""


def fabric(need: Settings, _: State) -> Iterator[Problem]:
    """Check that the network devices are up that UCX uses in jobs. `file`: has UCX_NET_DEVICES."""
    try:
        text = Path(need["file"]).read_text()
    except OSError:
        return
    match = UCX_DEVICES.search(text)
    for device in match[1].split(",") if match else ():
        name, *port = device.split(":")
        file = f"infiniband/{name}/ports/{port[0]}/state" if port else f"net/{name}/operstate"
        try:
            condition = (FABRIC / "class" / file).read_text().strip().rpartition(" ")[2].lower()
        except OSError:
            condition = "missing"
        if condition not in {"active", "up", "unknown"}:
            yield Problem(f"the network device {device}, which UCX uses, is {condition}")


def spool(need: Settings, _: State) -> Iterator[Problem]:
    """Check the files that slurmd needs to start a step. `prolog`: its program before each job.
    `cache`: Slurm's configuration in slurmd's folder, which the commands in jobs read.
    """
    for path in (need["prolog"], need["cache"]):
        if not os.access(path, os.X_OK):
            yield Problem(f"{path} is missing, or can't be used")


def make_spool(need: Settings, _: State) -> str | None:
    """Restart slurmd, which makes its folder when it starts."""
    if Path(need["cache"]).exists():
        return None
    ask("systemctl", "--no-block", "restart", "slurmd")
    end = time.monotonic() + START_S
    # If slurmd runs this program, it waits for its end, and the next check finds the folder.
    while not Path(need["cache"]).exists() and time.monotonic() < end:
        time.sleep(0.1)
    return ""


def units(need: Settings, _: State) -> Iterator[Problem]:
    """Check that units have not failed. A unit that a person has stopped is not `failed`."""
    for unit in failed_units(need):
        yield Problem(f"{unit} has failed")


def start_units(need: Settings, _: State) -> str:
    """Start the units that have failed."""
    for unit in failed_units(need):
        ask("systemctl", "start", unit)
    return ""


def failed_units(need: Settings) -> list[str]:
    states = need["systemd"]
    return [unit for unit in need["units"] if states.get(unit, {}).get("ActiveState") == "failed"]


def unit_states(needs: list[Settings]) -> dict[str, dict[str, str]]:
    """Return unit -> its properties in systemd, of all units in needs. Empty: systemd does not
    answer.
    """
    # One question for all, because each takes as long as all other checks.
    units = list(
        dict.fromkeys(
            unit
            for need in needs
            for unit in [*need.get("units", ()), need.get("unit", "")]
            if unit
        )
    )
    if not units:
        return {}
    shown = ask("systemctl", "show", f"--property={UNIT_PROPERTIES}", *units).text
    # An empty line separates the units.
    texts = [text.strip().splitlines() for text in shown.split("\n\n")]
    return {
        unit: dict(line.partition("=")[::2] for line in lines) for unit, lines in zip(units, texts)
    }


def restarts(need: Settings, _: State) -> Iterator[Problem]:
    """Check that a daemon does not end again and again. `unit`: its unit. `many`: how many restarts
    are too many. `steady_s`: a daemon that has run so long has recovered. `log`: its own log.
    """
    unit = need["unit"]
    values = need["systemd"].get(unit, {})
    count = number(values.get("NRestarts", "")) or 0
    since_s = (
        time.monotonic() - (number(values.get("ActiveEnterTimestampMonotonic", "")) or 0) / 1e6
    )
    is_steady = values.get("ActiveState") == "active" and since_s > need["steady_s"]
    if count >= need["many"] and not is_steady:
        fatal = last_fatal(unit, need["log"])
        yield Problem(f"{unit} has ended {count} times{f': {fatal}' if fatal else ''}")


def last_fatal(unit: str, log: str) -> str:
    """Return the last fatal error of a daemon, from the journal or else its log; "" without one."""
    journal = ask("journalctl", f"--unit={unit}", "--since=-10min", "--lines=200", "--output=cat")
    texts = [journal.text, ask("tail", "--lines=200", log).text]
    found = (FATAL.findall(text) for text in texts)
    return next((lines[-1][:160] for lines in found if lines), "")


def gpus(config: Settings, state: State) -> Iterator[Problem]:
    """Check the NVIDIA driver, the number of cards, and each card."""
    expected = config.get("gpus", {})
    if not expected.get("cards"):
        return
    if state.hangs("driver"):
        yield Problem("nvidia-smi still hangs: the driver does not respond")
        return
    answer, fields = query(state)
    if state.note_hang("driver", answer):
        yield Problem(f"nvidia-smi did not end within {DRIVER_S} s")
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.text.splitlines() if line]
    answered = [dict(zip(fields, row)) for row in rows if len(row) == len(fields)]
    if set(REMAPPED_ROWS) <= set(state.gone):
        for card, values in zip(answered, remapped_rows(len(answered))):
            card.update(values)
    cards = [{**dict.fromkeys(FIELDS, NOT_AVAILABLE), **card} for card in answered]
    if answer.rc and not any(LOST.search(str(card)) for card in cards):
        error = (answer.text.splitlines() or ["no answer"])[0][:120]
        meanings = [text for words, text in config["faults"].items() if words in error]
        yield Problem(": ".join(["nvidia-smi", error, *meanings[:1]]))
        return
    if len(cards) != expected["cards"]:
        yield Problem(f"{len(cards)} GPUs respond instead of {expected['cards']}")
    for card in cards:
        yield from check_gpu(card, config, state)
    if expected.get("parts"):
        yield from mig_devices(expected["parts"])


def query(state: State) -> tuple[Answer, list[str]]:
    """Query with nvidia-smi all fields that the driver knows. Return the output and the fields'
    names.
    """
    while True:
        names = {name: OLD_NAMES.get(name, "") if name in state.gone else name for name in FIELDS}
        queried_names = {
            name: queried
            for name, queried in names.items()
            if queried and (queried == name or queried not in state.gone)
        }
        argv = (f"--query-gpu={','.join(queried_names.values())}", "--format=csv,noheader,nounits")
        answer = ask("nvidia-smi", *argv, seconds=DRIVER_S)
        unknown = UNKNOWN_FIELD.search(answer.text)
        if not answer.rc or not unknown or unknown[1] not in queried_names.values():
            return answer, list(queried_names)
        state.gone.append(unknown[1])


def remapped_rows(cards: int) -> list[dict[str, str]]:
    """Return the values of nvidia-smi on remapped memory rows, by card; empty if not all cards
    respond.
    """
    answer = ask(
        "nvidia-smi", f"--query-remapped-rows={','.join(REMAPPED_ROWS)}", "--format=csv,noheader"
    )
    lines = answer.text.splitlines()
    is_complete = answer.rc == 0 and len(lines) == cards
    return [dict(zip(REMAPPED_ROWS, line.split(", "))) for line in lines] if is_complete else []


def check_gpu(card: dict[str, str], config: Settings, state: State) -> Iterator[Problem]:
    """Check a card by its values from nvidia-smi: field -> text. A value ``[N/A]`` is not
    checked.
    """
    value = {name: number(text) for name, text in card.items()}
    name = f"GPU {card['index']}"
    if lost := LOST.search(" ".join(card.values())):
        meanings = [text for words, text in config["faults"].items() if words in lost[1]]
        yield Problem(": ".join([name, lost[1], *meanings[:1]]))
        return
    yield from (
        Problem(f"{name}: {text}") for key, text in config["flags"].items() if card[key] in YES
    )
    fabric = card["fabric.state"].strip("[]")
    if fabric not in NO_FABRIC and card["fabric.status"] != LINKED.get(fabric):
        status = card["fabric.status"] if fabric in LINKED else fabric
        yield Problem(
            f"{name}: its NVLink fabric is {status}: {fabric_manager_hint(card['driver_version'])}",
            lasting=True,
        )
    now = card["mig.mode.current"]
    then = card["mig.mode.pending"]
    if {now, then} == {"Enabled", "Disabled"}:
        yield Problem(
            f"{name}: MIG is {now} now, but {then} after a reboot: reboot the node", lasting=True
        )
    limit = config["gpu_temperature_c"] - (COOLED_C if state.drained else 0)
    heat = value["temperature.gpu"]
    if heat is not None and heat > limit:
        yield Problem(f"{name}: {heat} C, the limit is {config['gpu_temperature_c']} C")
    if value["ecc.errors.uncorrected.volatile.total"]:
        count = value["ecc.errors.uncorrected.volatile.total"]
        yield Problem(f"{name}: {count} memory errors that ECC could not correct")
    yield from check_link(name, value, state, at_work=card["pstate"] == "P0")
    if card["compute_mode"] == "Prohibited":
        yield Problem(f"{name}: its compute mode forbids all work")
    reasons = value["clocks_event_reasons.active"] or 0
    for bit, words in SLOWED.items():
        if reasons & bit:
            yield Problem(f"{name}: slowed down ({words})", lasting=True)


@cache
def fabric_manager_hint(driver: str) -> str:
    """Return advice for an NVLink fabric that is not ready. driver: version of the NVIDIA
    driver.
    """
    match = MANAGER.search(ask("nv-fabricmanager", "--version").text)
    if match and match[1] != driver:
        return (
            f"nvidia-fabricmanager {match[1]} works only with the same driver version, not with "
            f"{driver}"
        )
    return "see nvidia-fabricmanager"


def check_link(
    name: str, value: dict[str, int | None], state: State, *, at_work: bool
) -> Iterator[Problem]:
    """Check the PCIe link of a card. at_work: whether the card is busy.

    The link of an idle card is slower and narrower, to save power. If a slow link has drained the
    node, this problem remains until the card is busy again; otherwise the idle node would be
    resumed.
    """
    earlier = [text for text in state.links if text.startswith(f"{name}: ")]
    if not at_work and state.drained:
        yield from (Problem(text, past=True) for text in earlier)
        return
    problems = list(check_busy_link(name, value)) if at_work else []
    lasting = [problem.text for problem in problems if without_numbers(problem.text) in state.seen]
    state.links = [text for text in state.links if text not in earlier] + lasting
    yield from problems


def check_busy_link(name: str, value: dict[str, int | None]) -> Iterator[Problem]:
    """Check the link of a busy card. Problems are ``lasting``, because the link becomes fast with a
    delay.
    """
    width = value["pcie.link.width.current"]
    widest = value["pcie.link.width.max"]
    if width is not None and widest is not None and width < widest:
        yield Problem(f"{name}: PCIe x{width} instead of x{widest}", lasting=True)
    speed = value["pcie.link.gen.gpucurrent"]
    fastest = value["pcie.link.gen.max"]
    if speed is not None and fastest is not None and speed < fastest:
        yield Problem(f"{name}: PCIe generation {speed} instead of {fastest}", lasting=True)


def number(text: str) -> int | None:
    try:
        return int(text, 0)
    except ValueError:
        return None


def mig_devices(expected: int) -> Iterator[Problem]:
    answer = ask("nvidia-smi", "--list-gpus", seconds=DRIVER_S)
    count = answer.text.count("UUID: MIG-")
    if answer.rc == 0 and count != expected:
        yield Problem(f"{count} MIG devices instead of {expected}")


def kernel(config: Settings, state: State) -> Iterator[Problem]:
    """Check for a GPU fault (XID) in the kernel's log that is newer than the last resumption by a
    person.
    """
    if not config.get("gpus", {}).get("cards"):
        return
    grave = set(config["xids"])
    log = ask("dmesg").text
    lines = [match for match in map(XID.match, log.splitlines()) if match]
    faults = [
        (float(match["at"]), int(match["number"]), match["where"])
        for match in lines
        if int(match["number"]) in grave
    ]
    faults += [(float(match["at"]), FALLEN_XID, match["where"]) for match in FALLEN.finditer(log)]
    state.xid, number, where = max(faults, default=(-1.0, 0, ""))
    if state.xid > state.known_xid:
        yield Problem(f"XID {number} at {where} in the kernel's log")


def disks(config: Settings, _: State) -> Iterator[Problem]:
    """Check the free space and inodes of each file system that jobs need."""
    devices = set()
    for path in config["disks"]:
        try:
            device = Path(path).stat().st_dev
            room = os.statvfs(path)
        except OSError as exc:
            if Path(path).parent.exists() and not isinstance(exc, FileNotFoundError):
                yield Problem(f"{path}: {exc.strerror}")
            continue
        if device in devices:
            continue
        devices.add(device)
        free_mib = room.f_bavail * room.f_frsize >> 20
        needed_mib = config["disk_free_mib"]
        if path == SHARED_MEMORY:
            # In containers, it may be smaller than the least free space on disks.
            needed_mib = min(needed_mib, (room.f_blocks * room.f_frsize >> 20) // 2)
        if room.f_flag & os.ST_RDONLY:
            yield Problem(f"{path} is mounted read-only")
        elif free_mib < needed_mib:
            yield Problem(f"{path} has {free_mib} MiB free, but needs {needed_mib}")
        elif room.f_files and not room.f_favail:
            yield Problem(f"{path} has no free inodes")


def clock(config: Settings, _: State) -> Iterator[Problem]:
    """Check the clock if chrony runs, because munge rejects all messages of a node with a wrong
    clock.
    """
    answer = ask("chronyc", "-c", "tracking")
    cells = answer.text.split(",")
    if answer.rc or len(cells) <= CHRONY_LEAP or cells[CHRONY_LEAP] == "Not synchronised":
        return
    try:
        offset = float(cells[CHRONY_OFFSET])
    except ValueError:
        return
    if abs(offset) > config["clock_offset_s"]:
        yield Problem(f"the clock is wrong by {abs(offset):.1f} s")


class Node(NamedTuple):
    """This node's state in Slurm. by_prolog: the Prolog has stopped a job since the last check."""

    name: str
    drained: bool
    reason: str
    by_prolog: bool = False

    @classmethod
    def read(cls, name: str) -> Node | None:
        answer = ask("scontrol", "--oneliner", "show", "node", name)
        state = re.search(r"\bState=(\S+)", answer.text)
        if answer.rc or not state:
            return None
        reason = re.search(r"\bReason=(.*?)(?: \[\S+@\S+\]|$)", answer.text)
        return cls(
            name, "DRAIN" in state[1], reason[1] if reason else "", by_prolog=STOPPED_A_JOB.exists()
        )

    @property
    def drained_by_us(self) -> bool:
        is_ours = self.reason.startswith(PREFIX.strip()) or (
            self.by_prolog and self.reason == OF_PROLOG
        )
        return self.drained and is_ours

    def update(self, *words: str) -> bool:
        return ask("scontrol", "update", f"NodeName={self.name}", *words).rc == 0

    def drain(self, problems: list[Problem]) -> bool:
        return self.update("State=DRAIN", f"Reason={reason_of(problems)}")


def reason_of(problems: list[Problem]) -> str:
    return (PREFIX + "; ".join(problem.text for problem in problems))[:LONGEST_REASON]


def act(problems: list[Problem], state: State, node: Node) -> None:
    """Drain or resume the node if necessary."""
    # A person has resumed the node, and so knows its problems.
    if state.drained and not node.drained:
        past = {problem.text for problem in problems if problem.past}
        state.links = [text for text in state.links if text not in past]
        state.known_xid = max(state.known_xid, state.drained_xid)
        if state.xid <= state.known_xid:
            past |= {problem.text for problem in problems if problem.text.startswith("XID ")}
        problems[:] = [problem for problem in problems if problem.text not in past]
    if not problems:
        state.drained = node.drained_by_us and not node.update("State=UNDRAIN")
    elif not node.drained or (
        node.drained_by_us and without_numbers(node.reason) != without_numbers(reason_of(problems))
    ):
        state.drained = node.drain(problems)
        state.drained_xid = state.xid
    else:
        state.drained = node.drained_by_us


def without_numbers(text: str) -> str:
    """Return the text with `#` for each number, so that texts of the same problem are equal in all
    checks.
    """
    return re.sub(r"\d+(\.\d+)?", "#", text)


# --- The needs -----------------------------------------------------------------------------------
class Check(NamedTuple):
    """A check of a need.

    look: called with the settings and the parameters of the need. Yields the problems.
    repair: tries to meet the need; called if there are problems. Returns why it failed, "" if it
        may have helped, None if there was nothing to try.
    is_quick: also runs before each job, and before slurmd starts.
    drains: its problems drain the node. Otherwise they are only reported.
    """

    look: Callable[[Settings, State], Iterator[Problem]]
    repair: Callable[[Settings, State], str | None] = lambda *_: None
    is_quick: bool = False
    drains: bool = True


CHECKS = {
    "folder": Check(folder, mount_folder, is_quick=True),
    "devices": Check(devices, open_devices, is_quick=True),
    "packages": Check(packages, is_quick=True),
    "python": Check(python, is_quick=True),
    "accounts": Check(accounts, is_quick=True),
    "homes": Check(homes, drains=False),
    "disks": Check(disks, is_quick=True),
    "writable": Check(writable, is_quick=True),
    "spool": Check(spool, make_spool),
    "units": Check(units, start_units),
    "fabric": Check(fabric),
    "clock": Check(clock),
    "xids": Check(kernel),
    "gpus": Check(gpus),
    "restarts": Check(restarts, drains=False),
}


class Look:
    """A run of checks that ends in time.

    seconds: for all checks together.
    may_repair: called before a need is repaired. Returns whether it may be.
    unseen: the checks that could not look, or were left out because the time was over, with the
        reason.
    """

    def __init__(
        self,
        config: Settings,
        state: State,
        seconds: float,
        may_repair: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config = config
        self.state = state
        self.seconds = seconds
        self.may_repair = may_repair
        self.unseen: list[str] = []

    def problems(self, wanted: Callable[[Check], bool]) -> list[Problem]:
        """Return the problems that the wanted checks find, in the order of ``CHECKS``."""
        end = time.monotonic() + self.seconds
        order = list(CHECKS)
        needs = sorted(
            (need for need in self.config.get("needs", ()) if wanted(CHECKS[need["check"]])),
            key=lambda need: order.index(need["check"]),
        )
        systemd = unit_states(needs)
        found = []
        for need in needs:
            check = CHECKS[need["check"]]
            # A check may take as long as the driver.
            if time.monotonic() > end - DRIVER_S:
                self.unseen.append(f"{need['check']}: the time was over")
                continue
            try:
                found += self._problems_of(check, {**self.config, **need, "systemd": systemd})
            except NotLookedError as exc:
                self.unseen.append(f"{need['check']}: {exc}")
        return found

    def _problems_of(self, check: Check, settings: Settings) -> list[Problem]:
        problems = list(check.look(settings, self.state))
        if problems and self.may_repair():
            failure = check.repair(settings, self.state)
            if failure is not None:
                settings["systemd"] = unit_states([settings])
                problems = list(check.look(settings, self.state))
            if failure and problems:
                problems[0].text += f" ({failure[:120]})"
        for problem in problems:
            problem.code, problem.what, problem.fix = (
                settings[key] for key in ("code", "what", "fix")
            )
        return problems


def lasting_problems(found: list[Problem], state: State) -> list[Problem]:
    """Return the problems without those that must last and were not found by the last check."""
    earlier_shapes = set(state.seen)
    state.seen = [without_numbers(problem.text) for problem in found]
    return [
        problem
        for problem in found
        if not problem.lasting or without_numbers(problem.text) in earlier_shapes
    ]


def check_node(config: Settings) -> list[Problem]:
    """Check all needs, repair what is possible, and drain or resume the node. Return the
    problems.
    """
    state = State.read()
    if STOPPED_A_JOB.exists():
        # The Prolog drained the node, which the state does not know.
        state.drained = None
    look = Look(config, state, CHECKS_S, may_repair=lambda: not is_drained_by_person(config))
    problems = lasting_problems(look.problems(lambda check: check.drains), state)
    if problems or state.drained is not False:
        node = Node.read(config["node"])
        # A check that did not run may have a problem, so the node is not resumed.
        if node is not None and (problems or not look.unseen):
            act(problems, state, node)
            STOPPED_A_JOB.unlink(missing_ok=True)
    state.write()
    for text in look.unseen:
        sys.stdout.write(f"not checked: {text}\n")
    return problems


def is_drained_by_person(config: Settings) -> bool:
    node = Node.read(config["node"])
    return node is not None and node.drained and not node.drained_by_us


def check_before_job(config: Settings) -> list[Problem]:
    """Drain the node if a job can't start here. Return the problems."""
    found = Look(config, State.read(), CHECKS_S).problems(lambda check: check.is_quick)
    problems = [problem for problem in found if not problem.lasting]
    if problems:
        STOPPED_A_JOB.touch()
        node = Node.read(config["node"])
        if node is not None and not node.drained:
            node.drain(problems)
    return problems


def await_needs(config: Settings) -> list[Problem]:
    """Repair the node until the quick checks pass, or the time is over. Return the problems."""
    end = time.monotonic() + BOOT_S - DRIVER_S
    state = State.read()
    pause_s = 1.0
    while True:
        look = Look(config, state, CHECKS_S, may_repair=lambda: True)
        problems = look.problems(lambda check: check.is_quick)
        if not problems or time.monotonic() + pause_s > end:
            state.write()
            return problems
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def report(config: Settings) -> list[dict[str, str]]:
    """Return the problems, each with code, what, why and fix, and the checks that could not look, each
    with code and why. Change nothing, and write no state.
    """
    state = State.read()
    look = Look(config, state, REPORT_S)
    problems = lasting_problems(look.problems(lambda _: True), state)
    return [
        {"code": problem.code, "what": problem.what, "why": problem.text, "fix": problem.fix}
        for problem in problems
    ] + [{"code": NOT_LOOKED, "why": text} for text in look.unseen]


def locked(seconds: float) -> TextIO | None:
    """Return the locked file ``LOCK``, or None if another process holds it longer."""
    file = LOCK.open("w")
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                file.close()
                return None
            time.sleep(0.1)
        else:
            return file


def main(mode: str = "") -> int:
    config = json.loads(CONFIG.read_text())
    if mode == "report":
        json.dump(report(config), sys.stdout)
        return 0
    if mode == "job":
        problems = check_before_job(config)
    else:
        lock = locked(CHECKS_S)
        if lock is None:
            sys.stdout.write("another check is still running\n")
            return 1
        with lock:
            problems = await_needs(config) if mode == "boot" else check_node(config)
    for problem in problems:
        sys.stdout.write(f"{problem.text}\n")
    unhealthy = UNFIT_FOR_JOB if mode == "job" else 1
    return unhealthy if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
