"""Slips at the command line, most in the words of a `submit`: one line answers each, with what to type."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import Failure, UsageError
from clusterctl.jobs.arguments import options_of
from clusterctl.spec.job import BUNDLED_JOBS, is_job_file
from clusterctl.spec.names import nearest
from clusterctl.spec.units import parse_slurm_memory_mib

_PROGRAMS: Final = (".py", ".sh", ".bash", ".yaml", ".yml")
_STARTERS: Final = frozenset({"python", "python3", "bash", "sh", "torchrun", "srun", "mpirun", "mpiexec"})
_LAUNCHED: Final = {"torchrun": ("--launcher", "torchrun")}
_MAIN: Final[Sequence[str]] = ("train.py", "main.py", "run.py", "run.sh")  # in a folder that was named
_NODES, _TASKS, _GPUS = "--nodes", "--tasks-per-node", "--gpus"
# How other programs call what a flag of ours says.
_SAME: Final = {
    "--comment": "--note",
    "--nnodes": _NODES,
    "--nproc-per-node": _TASKS,
    "--nproc_per_node": _TASKS,
}
_ALL_TASKS: Final = frozenset({"--ntasks", "-n", "-np", "--np"})
_IN_SCRIPTS: Final = frozenset(
    "--dependency -d --nodelist -w --exclusive --reservation --begin --hold -H --mail-type --mail-user "
    "--licenses -L --nice --distribution -m".split()
)
_UNITS: Final = re.compile(r"[A-Za-z]{1,7}")
_SHORT: Final = re.compile(r"(-[A-Za-z])(\d+)")
_QUOTED: Final = re.compile(r"""["'](--?[A-Za-z][\w-]*)["']""")  # in Python, of which other text is no option
_BARE: Final = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")
_KEY: Final = re.compile(r"""(?:^[ \t]+|[{,][ \t]*)["']?([\w.-]+)["']?:""", re.MULTILINE)
_MAX_SOURCE: Final = 1 << 20
# What other programs call a verb of ours.
_VERBS: Final = {
    **{
        "job": "jobs",
        "queue": "jobs",
        "squeue": "jobs",
        "ps": "jobs",
        "top": "jobs --watch",
        "sacct": "jobs",
    },
    **{"log": "logs", "tail": "logs -f", "follow": "logs -f", "ls": "list", "clusters": "list"},
    **{"run": "submit", "sbatch": "submit", "start": "up", "create": "up", "apply": "up", "repair": "up"},
    **{"stop": "down", "destroy": "down", "delete": "down", "rm": "down", "teardown": "down"},
    **{"rerun": "replay", "resubmit": "replay", "retry": "replay", "repeat": "replay"},
    **{"kill": "cancel", "scancel": "cancel", "fetch": "collect", "results": "collect"},
    **{"exec": "ssh", "login": "ssh", "connect": "ssh", "salloc": "shell", "srun": "shell --"},
    **{"upload": "put", "push": "put", "download": "get", "pull": "get"},
    **{"info": "status", "sinfo": "status", "nodes": "status", "check": "doctor", "diff": "plan"},
    **{
        "new": "init",
        "help": "--help",
        "version": "--version",
        "prune": "cache prune",
        "images": "cache list",
    },
}
_OPTIONS: Final = {  # of which verb: what is meant by which option
    "jobs": {"--follow": "jobs --watch", "-a": "jobs --all"},
    "status": {"--watch": "jobs --watch", "--follow": "jobs --watch"},
    "logs": {"--watch": "logs --follow"},
    "up": {"--check": "plan --check"},
    "ssh": {"-l": "ssh --user", "--root": "ssh --admin", "--sudo": "ssh --admin"},
}
_OF_RUNS: Final = {"compare": "diff", "remove": "rm", "delete": "rm", "info": "show", "ls": "list"}
_NEAR_ENOUGH: Final = 0.7


class SlipError(UsageError):
    """``command`` is the right one."""

    def __init__(self, what: str, command: str) -> None:
        failure = Failure(self.code, what, fix=f"`{command}`")
        super().__init__(f"{what}: {command}", failures=(failure,))


@dataclass
class _Words:
    """The words of a `submit`, sorted: what is ours, what is the program's, and the first slip."""

    takes: Mapping[str, bool]  # our options: whether each takes a value
    typed: Sequence[str]  # before the first --
    job: str
    ours: list[str] = field(default_factory=list)
    program: list[str] = field(default_factory=list)
    what: str = ""
    no_command: str = ""  # why there is no right command

    @cached_property
    def options(self) -> Mapping[str, bool | None]:
        """The program's; None where it is not known whether one takes a value."""
        return _program_options(self.job)

    def note(self, what: str) -> None:
        self.what = self.what or what


def meant_verb(word: str, known: Collection[str], groups: Mapping[str, Collection[str]]) -> str | None:
    """The verb that is meant by a word that is none; ``groups``: those of two words, none within a group."""
    near = nearest(word, known, cutoff=_NEAR_ENOUGH)
    if not groups:
        return _VERBS[word] if _VERBS.get(word) in known else near
    first, _, rest = word.partition("-")
    if word in BUNDLED_JOBS or (word.endswith(_PROGRAMS) and _is_file(word)):
        return f"submit {word}"
    if first in known and rest:
        return f"{first} {rest}"
    of_group = next((f"{group} {word}" for group, verbs in groups.items() if word in verbs), None)
    return _VERBS.get(word) or of_group or near


def reject_unknown_word(word: str, exc: Any, known: Collection[str], groups: Mapping[str, Any]) -> None:
    """Refuse a verb, or an option of one, that there is not; ``exc`` is click's error.

    Raises:
        UsageError: the right command can be told.
    """
    words = sys.argv[1:]
    group, verb = exc.ctx.command_path.split()[1:], exc.ctx.info_name
    if word.startswith("-"):
        meant = _OPTIONS.get(verb, {}).get(word)
        at, what = (words.index(verb) if verb in words else -1), f"{verb} has no option {word}"
        rest = [one for one in words[at + 1 :] if one != word]
    else:
        meant = meant_verb(word, known, {} if group else groups)
        if group == ["runs"]:  # else it is a run
            meant = _OF_RUNS.get(word) or meant or f"show {word}"
        at, what = (words.index(word) if word in words else -1), f"there is no verb {word!r}; did you mean"
        rest = words[at + 1 :]
        if word == "run" and rest and rest[0] in {*groups.get("runs", ()), *_OF_RUNS}:
            meant, rest = f"runs {_OF_RUNS.get(rest[0], rest[0])}", rest[1:]
        if word in {"cluster", "job"} and rest and rest[0] in known:
            meant, rest = ("jobs" if (word, rest[0]) == ("job", "list") else rest[0]), rest[1:]
    if meant and at >= 0:
        raise SlipError(what, shlex.join(["clusterctl", *words[:at], *meant.split(), *rest]))


def reject_slips(command: Any, words: Sequence[str]) -> None:
    """Refuse words of a `submit` that mean something else than what they would do.

    ``command`` is click's, which has our options.

    Raises:
        UsageError: an option is the program's, or unknown; words stand where none of the program's are read;
            or JOB is missing, or no job. The message has the right command, if one can be told.
    """
    takes = {
        name: not option.is_flag
        for option in command.params
        if option.param_type_name == "option"
        for name in (*option.opts, *option.secondary_opts)
    } | {"--help": False}
    typed, after = _parted(words)
    before = ["clusterctl", *sys.argv[1 : len(sys.argv) - len(words)]]
    place = _place_of_job(typed, takes)
    if place is None and after:
        return  # `submit -- JOB`
    missing = place is None
    if place is None:
        for name, job in reversed([*pairwise(typed)]):
            if takes.get(name) and job.endswith(_PROGRAMS) and _is_file(job):
                raise UsageError(
                    f"{name} takes a value, and {job} stands in its place", fix=f"say {name} VALUE {job}"
                )
        typed, place = ["train", *typed], 0  # for example
    job = typed[place]

    def whole(job: Sequence[str], ours: Sequence[str], program: Sequence[str]) -> str:
        dashes = ["--", *program] if program else []
        return shlex.join([*before, *job, *ours, *dashes])

    _reject_no_job(job, typed, place, lambda job, ours, program: whole([job], ours, [*program, *after]))
    one = _Words(takes, typed, job, what="no JOB is named, such as" if missing else "")
    _read(one, typed, place)
    if one.no_command:
        raise UsageError(one.no_command, fix=_lists(job))
    if one.what:
        raise SlipError(one.what, whole([], one.ours, [*one.program, *after]))


def _parted(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before the first -- and those after it."""
    at = list(words).index("--") if "--" in words else len(words)
    return list(words[:at]), list(words[at + 1 :])


def _place_of_job(typed: Sequence[str], takes: Mapping[str, bool]) -> int | None:
    """Which of the words is JOB: the first that can be one, or else the first that follows no option."""
    free: list[int] = []
    doubtful: list[int] = []  # they may be the value of an option that is not ours
    place = 0
    while place < len(typed):
        word = typed[place]
        if _is_option(word):
            known = takes.get(word.partition("=")[0])
            place += 2 if known and "=" not in word else 1
            if (
                known is None
                and word[:2] not in takes
                and place < len(typed)
                and not _is_option(typed[place])
            ):
                doubtful.append(place)
                place += 1
            continue
        free.append(place)
        place += 1
    in_order = sorted([*free, *doubtful])
    if free and typed[free[0]] in _STARTERS:
        return free[0]
    found = next((place for place in in_order if _is_job(typed[place])), None)
    return found if found is not None else next(iter(free), None)


def _is_option(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not word[1].isdigit()


def _is_job(word: str) -> bool:
    return word in BUNDLED_JOBS or word.endswith(_PROGRAMS) or _is_file(word)


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except (OSError, ValueError):  # no name that a file can have
        return False


def _reject_no_job(
    job: str, typed: Sequence[str], place: int, whole: Callable[[str, Sequence[str], Sequence[str]], str]
) -> None:
    """
    Raises:
        UsageError: what stands for JOB is none, and what was meant can be told.
    """
    rest = [*typed[:place], *typed[place + 1 :]]
    if job in BUNDLED_JOBS or _is_file(job):
        return
    if job in _STARTERS:
        later = next((at for at in range(place + 1, len(typed)) if typed[at].endswith(_PROGRAMS)), None)
        if later is not None:
            mine, theirs = [*typed[:place], *_LAUNCHED.get(job, ())], typed[later + 1 :]
            raise SlipError(f"{job} is started by the job itself", whole(typed[later], mine, theirs))
        return
    inner = _split(job)
    if len(inner) > 1 and _is_job(inner[0]):
        raise SlipError(
            "JOB and the program's arguments are words of their own", whole(inner[0], rest, inner[1:])
        )
    path = Path(job)
    if (programs := _programs_in(path)) is not None:
        main = next((name for name in _MAIN if name in programs), None)
        main = main or (programs[0] if len(programs) == 1 else None)
        if main:
            raise SlipError(f"{job} is a folder; name a script in it", whole(str(path / main), rest, []))
        return
    plain = job in {path.name, f"./{path.name}"}
    if plain and is_job_file(job) and path.stem in BUNDLED_JOBS:
        raise SlipError(
            f"there is no job file {job}; the bundled job is called without .yaml", whole(path.stem, rest, [])
        )
    bundled = {name: name for name in BUNDLED_JOBS if plain}
    files = _files_beside(path)
    known = bundled | files if path.suffix else files | bundled
    if near := nearest(path.stem, known):
        raise SlipError(f"there is no job {job!r}; did you mean {known[near]}", whole(known[near], rest, []))


def _programs_in(folder: Path) -> list[str] | None:
    """The names of the programs in a folder; None if it is none, or can't be read."""
    try:
        return sorted(one.name for one in folder.iterdir() if one.name.endswith((".py", ".sh")))
    except OSError:
        return None


def _split(job: str) -> list[str]:
    try:
        return shlex.split(job)
    except ValueError:  # an open quote
        return []


def _files_beside(path: Path) -> dict[str, str]:
    """Programs and job files in the folder of a path, by stem: of several the one with its ending."""
    try:
        files = [one for one in path.parent.iterdir() if one.name.endswith(_PROGRAMS) and one.is_file()]
    except (OSError, ValueError):
        return {}
    return {one.stem: str(one) for one in sorted(files, key=lambda one: one.suffix == path.suffix)}


def _program_options(job: str) -> Mapping[str, bool | None]:
    """The options of a bundled job's program, or those that the text of a script has."""
    if job in BUNDLED_JOBS:
        return dict(options_of(job))
    if is_job_file(job):
        return {}
    try:
        with Path(job).open(encoding="utf-8", errors="replace") as file:
            text = file.read(_MAX_SOURCE)
    except (OSError, ValueError):
        return {}
    pattern = _QUOTED if job.endswith(".py") else _BARE
    return dict.fromkeys(pattern.findall(text))


def _read(one: _Words, typed: Sequence[str], place: int) -> None:
    """Sort the words into ours and the program's, and note what is wrong with them."""
    left = list(enumerate(typed))

    def values(most: int | None) -> list[str]:
        """The words that follow, up to an option or JOB."""
        found: list[str] = []
        while left and left[0][0] != place and not _is_option(left[0][1]) and len(found) != most:
            found.append(left.pop(0)[1])
        return found

    while left:
        at, word = left.pop(0)
        name, equals, _ = word.partition("=")
        if at == place:
            one.ours.append(word)
        elif not _is_option(word):
            _stray(one, word)
        elif name in one.takes or (word[:2] in one.takes and not word.startswith("--")):
            one.ours.append(word)
            if one.takes.get(name) and not equals and left:
                one.ours.append(left.pop(0)[1])
        else:
            _unknown(one, word, values)


def _unknown(one: _Words, word: str, values: Callable[[int | None], list[str]]) -> None:
    """An option that `submit` does not have."""
    if match := _SHORT.fullmatch(word):
        word = f"{match[1]}={match[2]}"  # -n4
    name, equals, text = word.partition("=")
    title = _title(one.job)

    def whole(name: str, takes: bool | None) -> list[str]:
        """The option under this name, with its values."""
        return [name + equals + text, *([] if equals else values(takes if takes is None else int(takes)))]

    if name in one.options:
        one.note(f"{title}'s own options go after --")
        one.program += whole(name, one.options[name])
        return
    if own := _translated(one, name, (lambda: text) if equals else (lambda: "".join(values(1)))):
        one.note(own[0])
        one.ours += own[1]
        return
    near, ends = _near(one, name)
    if len(ends) > 1:
        one.no_command = f"there is no option {name}; {title} has {' and '.join(ends)}, which go after --"
    elif near in one.takes:
        one.note(f"there is no option {name}; did you mean {near}")
        one.ours += whole(near, one.takes[near])
    elif near:
        one.note(f"there is no option {name}; did you mean {title}'s {near}, which goes after --")
        one.program += whole(near, one.options[near])
    elif one.job in BUNDLED_JOBS:
        one.no_command = one.no_command or f"neither submit nor {title} has an option {name}"
    elif name in _IN_SCRIPTS and one.job.endswith((".sh", ".bash")):
        one.no_command = f"submit has no option {name}; a line `#SBATCH {name} ...` in {title} works"
    else:
        one.note(f"submit has no option {name}; {title}'s own go after --")
        one.program += whole(name, None)


def _near(one: _Words, name: str) -> tuple[str, list[str]]:
    """The long option that is most like this one, and the program's that end with its name."""
    if not name.startswith("--"):
        return "", []
    known = {long.lstrip("-"): long for long in (*one.options, *one.takes) if long.startswith("--")}
    ends = [option for option in one.options if option.endswith(name[1:])]
    return known.get(nearest(name.lstrip("-"), known, cutoff=_NEAR_ENOUGH) or "", ""), ends


def _translated(one: _Words, name: str, value: Callable[[], str]) -> tuple[str, list[str]] | None:
    """What an option of another program is here: how it is told, and our words."""
    if same := _SAME.get(name):
        return f"{name} is {same} here", [same, value()]
    if name in _ALL_TASKS:
        text, nodes = value(), _given(one, _NODES, "-N")
        shared = int(text) // nodes if text.isdecimal() and nodes and int(text) % nodes == 0 else text
        return f"{name} counts all tasks; here it is the tasks of a node", [_TASKS, str(shared)]
    if name == "--mem-per-cpu":
        cores = (_given(one, "--cpus", "--cpus-per-task", "-c") or 1) * (_given(one, _TASKS) or 1)
        return f"{name} is the memory of a core; here it is the memory of a node", [
            "--mem",
            _times(value(), cores),
        ]
    if name == "--gres":
        return f"{name} is {_GPUS} here", [_GPUS, value().rpartition(":")[2]]
    return None


def _given(one: _Words, *names: str) -> int | None:
    """The number that an option was given."""
    pairs = [*pairwise(one.typed), *(word.partition("=")[::2] for word in one.typed)]
    return next((int(text) for name, text in pairs if name in names and text.isdecimal()), None)


def _times(memory: str, cores: int) -> str:
    try:
        mib = parse_slurm_memory_mib(memory) * cores
    except ValueError:
        return memory
    return f"{mib // 1024}G" if mib % 1024 == 0 else f"{mib}M"


def _stray(one: _Words, word: str) -> None:
    """A word before -- that is no option, nor JOB."""
    option, number = ("", "", *one.ours)[-2:]
    timed = option in {"--time", "-t", "--timeout"}
    title = _title(one.job)
    if (timed or option == "--mem") and number.isdecimal() and _UNITS.fullmatch(word):
        one.ours[-1] += word[0].lower() if timed else word[0].upper()
        one.note(f"'{number} {word}' is two words")
    elif one.job in BUNDLED_JOBS and one.job != "predict":
        if word.isdecimal():
            one.note(f"{word} is no argument of {title}; a number of nodes is told by {_NODES}")
            one.ours += [_NODES, word]
        elif (option := f"--{word.partition('=')[0]}") in one.options and "=" in word:
            one.note(f"{title}'s own options go after --, and begin with --")
            one.program.append(f"--{word}")
        else:
            one.no_command = one.no_command or f"{title} takes no word {word!r}"
    elif is_job_file(one.job) and word in _variants(one.job):
        one.note("variants are named by --variant")
        one.ours += ["--variant", word]
    else:
        one.note(f"arguments of {title} go after --")
        one.program.append(word)


def _variants(job: str) -> Collection[str]:
    """Keys of a job file, among them its variants, whatever else is wrong with it."""
    try:
        return _KEY.findall(Path(job).read_text(errors="replace"))
    except OSError:
        return ()


def _title(job: str) -> str:
    return "the program" if is_job_file(job) else Path(job).name


def _lists(job: str) -> str:
    own = f", `clusterctl submit {job} -- --help` the program's" if job in BUNDLED_JOBS else ""
    return f"`clusterctl submit --help` lists submit's options{own}"
