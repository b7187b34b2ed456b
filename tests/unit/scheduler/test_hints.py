"""Hints: what known messages usually mean, and what is known of the user's files and script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl.scheduler.ends.diagnose import diagnose
from clusterctl.scheduler.ends.diagnosis import Diagnosis, Hint
from clusterctl.scheduler.ends.facts import Evidence, LocalMatch, Packages
from clusterctl.scheduler.ends.hints import rows, usual_hint
from clusterctl.scheduler.history import Attempt
from clusterctl.scheduler.sites.advice import FOREIGN, OWN, Advice
from clusterctl.util.assets import read_table
from tests.unit.scheduler.test_diagnosis import JOB, TRACEBACK, job_with

HINTED = read_table(Path(__file__).with_name("data") / "hinted.yaml", dict[str, str])
# Lines that programs write while nothing is wrong, or about which nothing is known.
ORDINARY = (
    "epoch 7: loss 0.31, accuracy 0.91",
    "validation failed: accuracy 0.1 is below 0.5",
    "Newton did not converge in 50 steps",
    "0 of 12 sites are valid",
    "step 40: energy -100.25, memory 3.9 of 4 GiB",
    "ValueError: row 3 has 4 columns, expected 5",
    "KeyError: 'weight_decay'",
    "checksum of base.tar does not match",
    "grid 64x64x64, 8 ranks, 2 nodes",
    "wrote /scratch/ada/out.h5",
    "connected to n2:4711",
    "INFO:root:reading data/train.csv",
    "error: energy diverged at step 90",
    "make: *** [Makefile:3: main] Error 1",
)


def hinted(log: str, **evidence: Any) -> Diagnosis:
    return diagnose(Evidence(job=job_with(nodes=("n1",)), log=log, **evidence))


def hint_of(name: str, found: Diagnosis) -> Hint:
    return next(hint for hint in found.hints if hint.name == name)


@pytest.mark.parametrize("advice", [OWN, FOREIGN])
def test_each_row_has_a_line_with_its_hint(advice: Advice) -> None:
    assert HINTED.keys() == {row.name for row, _ in rows()}
    for name, line in HINTED.items():
        (hint,) = usual_hint([line], Evidence(job=JOB, advice=advice))
        assert (hint.name, "{" in hint.told("")) == (name, False)


@pytest.mark.parametrize("line", ORDINARY)
def test_ordinary_line_has_no_hint(line: str) -> None:
    assert not [*usual_hint([line], Evidence(job=JOB))]


def test_hint_about_no_packages_searches_for_none() -> None:
    def search() -> Packages:
        raise AssertionError

    assert [*usual_hint(["./a: Permission denied"], Evidence(job=JOB, packages=search))]


def test_row_that_says_little_is_left_out_beside_another() -> None:
    names = [hint.name for hint in hinted("sh: a: Disk quota exceeded: Permission denied\n").hints]
    assert names == ["disk-quota"]


@pytest.mark.parametrize(
    "line",
    [
        "WARNING: No space left on device for the cache",
        "[W1122 a.cc:3] Connection refused",
        "2026-11-27 10:00:00.123 | WARNING  | app:main:3 - Connection refused",
        "Connection refused, retrying in 5 s",
        "No module named 'apex', using torch.optim instead",
        "make: tidy: No such file or directory (ignored)",
        "+ echo 'CUDA out of memory'",
        "rm: cannot remove 'old': No such file or directory",
        '{"level": "warning", "msg": "Connection refused"}',
    ],
)
def test_line_that_says_itself_that_it_is_no_error_has_no_hint(line: str) -> None:
    assert not hinted(f"{line}\nbad mesh\n").hints


def test_hints_are_about_the_last_statement_only() -> None:
    assert not hinted("open: No space left on device\na\n").hints
    assert hinted("open: No space left on device\n").hints
    # R writes its message below the call.
    call = 'In file(con, "r") :\n  cannot open file'
    assert hinted(f"{call} 'x': No such file or directory\nExecution halted\n").hints
    # Other indented lines belong to the statement above.
    assert hinted("java.io.IOException: No space left on device\n" + "\tat A.b(A.java)\n" * 5).hints


@pytest.mark.parametrize(
    "end",
    ["Execution halted\n", "compilation terminated.\n", "Node.js v20.19.2\n", "clusterctl: bye\n"],
)
def test_line_that_only_says_that_the_program_ends_is_not_the_last(end: str) -> None:
    assert hinted(f"open: No space left on device\n{end}").hints


def test_message_of_mpirun_between_rules_has_a_hint_and_bash_in_the_midst_of_a_log_none() -> None:
    rule = "-" * 74
    slots = "There are not enough slots available in the system to satisfy the 64"
    more = "x\n" * 20
    names = [hint.name for hint in hinted(f"{rule}\n{slots}\n{more}{rule}\n").hints]
    assert names == ["mpi-slots"]
    assert not hinted(f"job.sh: line 2: module: command not found\n{more}").hints


def test_hint_has_its_line_which_is_not_repeated_in_words() -> None:
    (hint,) = hinted("cp: error writing 'x': Disk quota exceeded\n").hints
    assert hint.line == "cp: error writing 'x': Disk quota exceeded"
    assert hint.told("").startswith("hint: usually a quota")
    assert hint.line not in hint.told("")


def test_earlier_exceptions_have_no_hint() -> None:
    """The program went on after them: with another exception, or without the thread."""
    first = f"{TRACEBACK}OSError: [Errno 28] No space left on device\n"
    link = "\nThe above exception was the direct cause of the following exception:\n\n"
    assert hinted(first).hints
    assert not hinted(f"{first}{link}{TRACEBACK}RuntimeError: write failed\n").hints
    assert not hinted(f"bad mesh\nException in thread T-1 (f):\n{first}").hints


@pytest.mark.parametrize(
    ("signal", "name"), [(9, "killed"), (15, "terminated"), (11, "host-memory")]
)
def test_last_words_of_a_killed_process_have_no_hint(signal: int, name: str) -> None:
    job = job_with(signal=signal, exit_code=0)
    found = diagnose(Evidence(job=job, log=f"{TRACEBACK}MemoryError\n"))
    assert [hint.name for hint in found.hints] == [name]


def test_end_has_a_single_hint() -> None:
    """Of the last line, of what mpirun says of the end, and of the exit code."""
    rule = "-" * 74
    slots = "There are not enough slots available in the system"
    log = f"{rule}\n{slots}\n{rule}\njob.sh: line 2: ./a.out: Permission denied\n"
    found = diagnose(Evidence(job=job_with(exit_code=137), log=log))
    assert [hint.name for hint in found.hints] == ["mpi-slots"]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"signal": 11, "exit_code": 0}, "segmentation-fault"),
        ({"signal": 7, "exit_code": 0}, "bus-error"),
        ({"signal": 9, "exit_code": 0}, "killed"),
        ({"exit_code": 75}, "exit-code"),
        ({"exit_code": 139}, "exit-code"),
        ({"exit_code": 127}, ""),
        ({"exit_code": 3}, ""),
    ],
)
def test_signal_and_exit_code_have_a_hint(fields: dict[str, int], name: str) -> None:
    found = diagnose(Evidence(job=job_with(**fields), log="step 3\n"))
    assert [hint.name for hint in found.hints] == [name][: bool(name)]


# --- Certain hints -------------------------------------------------------------------------------
NOT_STARTED = "slurmstepd-n1: error: execve(): hostname: No such file or directory\n"


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("#!/bin/bash\nsrun --export=SEED=7 hostname\n", "step-without-path"),
        ("#!/bin/bash\nsrun -n 2 --export NONE hostname\n", "step-without-path"),
        ("#!/bin/bash\nsrun --export=ALL,SEED=7 hostname\n", "command-not-found"),
        ("#!/bin/bash\n# srun --export=NONE hostname\nsrun hostname\n", "command-not-found"),
        ("", "command-not-found"),
    ],
)
def test_srun_that_finds_no_command_has_no_path_only_with_export(script: str, name: str) -> None:
    assert [hint.name for hint in hinted(NOT_STARTED, script=script).hints] == [name]


@pytest.mark.parametrize(
    ("log", "name"),
    [("%x-%j.out", "train-12.out"), ("logs/%j.out", "logs/12.out"), ("./a.out", "a.out")],
)
def test_script_that_reads_its_own_log_is_told(log: str, name: str) -> None:
    line = f"cat: {name}: No such file or directory\n"
    script = f"#!/bin/bash\n#SBATCH --output={log}\ncat {name}\n"
    assert hint_of("log-has-another-path", hinted(line, script=script)).is_certain
    assert "log-has-another-path" not in {hint.name for hint in hinted(line).hints}


def test_lines_for_another_scheduler_are_told() -> None:
    script = "#!/bin/bash\n#PBS -l nodes=2\ncd $PBS_O_WORKDIR\n"
    assert hint_of("other-scheduler", hinted("x\n", script=script)).is_certain


def test_lines_of_the_log_explain_the_end_before_the_script() -> None:
    script = "#!/bin/bash\n#PBS -l nodes=2\n"
    missing = hinted(f"{TRACEBACK}ModuleNotFoundError: No module named 'yaml'\n", script=script)
    assert [hint.name for hint in missing.hints] == ["missing-module", "other-scheduler"]
    assert missing.fix == missing.hints[0].fix
    odd = hinted(f"{TRACEBACK}ValueError: odd\n", script=script)
    assert odd.fix != hint_of("other-scheduler", odd).fix


@pytest.mark.parametrize("image", ["", "a.sqfs"])
@pytest.mark.parametrize(
    "line",
    [
        "tool: libfoo.so.3: cannot open shared object file: No such file or directory\n",
        "run.sh: line 2: ffmpeg: command not found\n",
    ],
)
def test_what_an_image_lacks_is_not_missing_on_the_node(line: str, image: str) -> None:
    (found,) = hinted(line, packages=lambda: Packages(image=image)).hints
    assert ("on the node" in found.says, "on the nodes" in found.fix) == (not image, not image)
    assert ("add it to the image" in found.fix) == bool(image)


def test_program_of_the_driver_is_missing_where_there_is_no_gpu() -> None:
    (found,) = hinted("job.sh: line 2: nvidia-smi: command not found\n").hints
    assert found.name == "no-nvidia-driver"


@pytest.mark.parametrize(
    "line",
    [
        "cat: kept/data.csv: No such file or directory\n",
        "Fortran runtime error: Cannot open file 'kept/data.csv': No such file or directory\n\n"
        "Error termination. Backtrace:\n#0  0x7f4377b662ba in ???\n#1  0x563d1872e20a in MAIN__\n",
    ],
)
def test_fix_of_a_certain_hint_is_that_of_the_diagnosis(line: str) -> None:
    def left_here(_: str, *, is_module: bool) -> LocalMatch:
        return LocalMatch() if is_module else LocalMatch(home="/kept/data.csv")

    found = hinted(line, left_here=left_here, excluded=("kept",))
    assert [hint.name for hint in found.hints] == ["file-stayed-at-home"]
    assert found.fix == "submit with --include /kept/data.csv and without --exclude kept"
    assert found.fix not in found.hints[0].told(found.fix)


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("cv2", "opencv-python"),
        ("yaml.loader", "PyYAML"),
        ("pandas", "pandas"),
        ("sklearn", "scikit-learn"),
        ("mypkg", "the package that has mypkg"),
    ],
)
def test_missing_module_names_the_package_that_provides_it(module: str, package: str) -> None:
    log = f"{TRACEBACK}ModuleNotFoundError: No module named '{module}'\n"
    assert f"add {package} to" in hinted(log).fix


LIBRARY = "/opt/clusterctl/env/lib/python3.13"
SHADOW = f"""\
Traceback (most recent call last):
  File "/jobs/x/cuda.py", line 1, in <module>
    import torch
  File "{LIBRARY}/site-packages/torch/__init__.py", line 30, in <module>
    from cuda import pathfinder
  File "/jobs/x/cuda.py", line 2, in <module>
    x = torch.zeros(2)
AttributeError: partially initialized module 'torch' has no attribute 'zeros' (circular import)
"""


def test_file_that_hides_a_package_is_named_by_the_frames() -> None:
    assert hint_of("own-file-hides-package", hinted(SHADOW)).says.startswith(
        "your file /jobs/x/cuda.py"
    )
    # A library may import a program of the user by its name, as a launcher does.
    launched = SHADOW.replace("site-packages/torch/__init__.py", "importlib/__init__.py")
    assert not any(hint.is_certain for hint in hinted(launched).hints)


def test_known_cause_has_hints_only_if_the_program_may_tell_why() -> None:
    header = "main.c:1:10: fatal error: mpi.h: No such file or directory\n"
    failed = {"event": "cause", "time": 1, "code": "build-failed", "text": "--build make failed"}
    build = hinted(header, attempt=Attempt(events=[failed]))
    assert build.code == "build-failed"
    assert hint_of("missing-header", build)
    assert not hinted(
        "open: No space left on device\n", lost={"n1": "Not responding"}, ends={}
    ).hints
