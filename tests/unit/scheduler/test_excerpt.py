"""The lines of a job's logs that are shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from clusterctl.scheduler.ends.excerpt import OF_JOB, OF_OTHERS, Excerpt, excerpt_of
from clusterctl.scheduler.ends.facts import Evidence
from clusterctl.scheduler.ends.failed_rank import FailedRank
from tests.unit.scheduler.test_diagnosis import JOB, TORCHRUN, TRACEBACK

PEER = TRACEBACK + "RuntimeError: [/gloo/pair.cc:537] Connection closed by peer [10.0.0.2]:33\n"
BUG = TRACEBACK + "KeyError: 'a bug'\n"
STEPS = "".join(f"step {number} energy -100.0\n" for number in range(40))
LIBRARY = "/opt/clusterctl/env/lib/python3.13"
RANK_1 = FailedRank(rank=1, host="n2", exit_code=1)


def shown(log: str, failed: FailedRank | None = None, **evidence: Any) -> Excerpt:
    return excerpt_of(Evidence(job=JOB, log=log, **evidence), failed or FailedRank(exit_code=1))


def test_log_without_a_traceback_shows_its_last_lines() -> None:
    found = shown(f"cannot write: No space left on device\n{STEPS}error: diverged\n")
    assert (found.source, found.traceback, found.between) == (OF_JOB, (), 0)
    assert found.lines[-2:] == ("step 39 energy -100.0", "error: diverged")
    assert len(found.lines) == 10


def test_traceback_and_last_lines_are_both_shown_with_what_lies_between_counted() -> None:
    """A script went on after a program that an exception had ended."""
    found = shown(f"a\nb\nc\n{BUG}{STEPS}tar: out: Cannot stat: No such file or directory\n")
    assert found.exception == "KeyError: 'a bug'"
    assert found.before == ("b", "c")
    assert found.traceback[-1] == found.exception
    assert found.between == 41 - len(found.last)
    assert found.last[-1].startswith("tar: out")


def test_paragraphs_of_a_message_are_shown() -> None:
    found = shown(TRACEBACK + "ResourceError: Graph execution error:\n\nOOM when allocating\n")
    assert found.lines[-2:] == ("ResourceError: Graph execution error:", "OOM when allocating")


@pytest.mark.parametrize("log", [BUG + PEER, PEER + BUG])
def test_exception_of_another_ranks_end_is_not_shown(log: str) -> None:
    assert shown(log).exception == "KeyError: 'a bug'"
    assert shown(PEER).is_consequence


@pytest.mark.parametrize(
    ("ranks", "failed", "source", "last"),
    [
        ({1: "own words\n"}, RANK_1, "rank 1 on n2", "own words"),
        # A silent rank: what the others wrote may tell of it.
        ({1: ""}, RANK_1, OF_OTHERS, "words of rank 0"),
        ({}, RANK_1, OF_JOB, "words of rank 0"),
        # A killed rank had no last words.
        ({1: ""}, FailedRank(rank=1, signal="SIGKILL"), OF_JOB, ""),
        (
            {1: "step 3\n"},
            FailedRank(rank=1, host="n2", signal="SIGKILL"),
            "rank 1 on n2",
            "step 3",
        ),
    ],
)
def test_lines_are_of_the_rank_that_failed_first(
    ranks: Mapping[int, str], failed: FailedRank, source: str, last: str
) -> None:
    found = shown("words of rank 0\n", failed, ranks=ranks)
    assert (found.source, "".join(found.last[-1:])) == (source, last)


def test_log_of_the_job_is_shown_if_the_rank_only_lost_another() -> None:
    found = shown(BUG, RANK_1, ranks={1: PEER})
    assert (found.source, found.exception) == (OF_OTHERS, "KeyError: 'a bug'")


def test_own_lines_of_the_rank_come_before_exceptions_of_others() -> None:
    """The others may have raised theirs because the rank was gone."""
    found = shown(BUG, RANK_1, ranks={1: "no such key: lr\n", 0: BUG})
    assert (found.lines, found.source) == (("no such key: lr",), "rank 1 on n2")


def test_two_streams_are_shown_apart() -> None:
    found = shown("epoch 1\nepoch 2\n\ndone with 3\n", stdout="epoch 1\nepoch 2\n")
    assert (found.last, found.beside) == (("done with 3",), ("epoch 1", "epoch 2"))
    assert found.beside_of == "stdout"
    # A traceback on stdout does not hide the last words on stderr.
    other = shown(f"{BUG}\nno folds are left\n", stdout=BUG)
    assert (other.exception, other.beside, other.beside_of) == (
        "KeyError: 'a bug'",
        ("no folds are left",),
        "stderr",
    )


def test_failed_command_of_a_script_is_shown_above_later_lines() -> None:
    found = shown(f"job.sh: line 2: module: command not found\n{STEPS}")
    assert found.of_shell == ("job.sh: line 2: module: command not found",)
    assert found.lines[:2] == (*found.of_shell, "[...]")


@pytest.mark.parametrize(
    ("said", "trace"),
    [
        ("panic: runtime error: index out of range", "main.f(0x3)\n\t/w/main.go:8 +0x1d\n"),
        ("SUMMARY: AddressSanitizer: heap-use-after-free a.c:3 in f", "  0x0c: fa fa\n"),
    ],
)
def test_runtime_says_above_its_trace_why_it_ends_the_program(said: str, trace: str) -> None:
    assert shown(f"{STEPS}{said}\n{trace * 20}").lines[:2] == (said, "[...]")


def test_message_of_mpirun_is_shown_by_its_first_line() -> None:
    first = "There are not enough slots available in the system to satisfy the 64"
    rule = "-" * 74
    rest = "\n".join(f"explanation {number}" for number in range(20))
    assert shown(f"{rule}\n{first}\n{rest}\n{rule}\n").of_shell == (first,)
    assert shown(f"{rule}\n{first}\n{rest}\n").of_shell == ()


def chained(first: str, link: str, second: str) -> str:
    return f"{TRACEBACK}{first}\n\n{link}\n\n{TRACEBACK}{second}\n"


DIRECT = "The above exception was the direct cause of the following exception:"
DURING = "During handling of the above exception, another exception occurred:"


@pytest.mark.parametrize("link", [DIRECT, DURING])
def test_exceptions_of_a_chain_are_told(link: str) -> None:
    found = shown(chained("OSError: [Errno 28] No space left on device", link, "ValueError: x"))
    assert found.chain == ("OSError: [Errno 28] No space left on device",)
    assert found.exception == "ValueError: x"


def frames(*places: str) -> str:
    each = (f'  File "{place}", line {line}, in f\n    f()\n' for line, place in enumerate(places))
    return f"Traceback (most recent call last):\n{''.join(each)}"


def test_place_is_the_last_line_of_the_user_and_its_frame_is_shown() -> None:
    library = [f"{LIBRARY}/site-packages/torch/nn.py"] * 5
    found = shown(frames("/jobs/x/main.py", "/jobs/x/fit.py", *library) + "RuntimeError: shape\n")
    assert found.place == "/jobs/x/fit.py:1"
    assert '  File "/jobs/x/fit.py", line 1, in f' in found.traceback
    assert len(found.traceback) == 1 + 2 * 4 + 1


# Frames of mpi4py, NumPy, generated code, commands and archives, and of interpreters of the system.
FOREIGN_FILES = (
    "src/mpi4py/MPI.src/msgpickle.pxi",
    "numpy/random/mtrand.pyx",
    "<string>",
    "<__array_function__ internals>",
    "<frozen importlib._bootstrap>",
    "/env/bin/torchrun",
    "/shared/eggs/tool-1.0-py3.11.egg/tool/run.py",
    "/shared/tool.pex/run.py",
    "/usr/lib/python3/dist-packages/yaml/__init__.py",
    "/opt/conda/lib/python3.11/json/decoder.py",
    "/opt/pypy/lib/pypy3.10/os.py",
    "/jobs/x/.venv/lib64/python3.12/site-packages/torch/nn.py",
    "/usr/share/snakemake/workflow.py",
)


@pytest.mark.parametrize("file", FOREIGN_FILES)
def test_place_is_in_no_library_and_the_users_frame_is_quoted(file: str) -> None:
    found = shown(frames("/jobs/x/main.py", *[file] * 4) + "PicklingError: x\n", folder="/jobs/x")
    assert found.place == "main.py:0"
    assert found.traceback[1] == '  File "/jobs/x/main.py", line 0, in f'
    assert len(found.traceback) == 1 + 2 * 4 + 1


def test_frames_of_mpi4py_without_source_lines_do_not_hide_the_users() -> None:
    """As mpi4py 4 writes the error about a lambda that is sent."""
    pxi = "".join(
        f'  File "src/mpi4py/MPI.src/{name}", line {line}, in mpi4py.MPI.{what}\n'
        for name, line, what in (
            ("Comm.pyx", 1507, "Comm.send"),
            ("msgpickle.pxi", 193, "PyMPI_send"),
            ("msgpickle.pxi", 173, "pickle_dump"),
            ("msgpickle.pxi", 159, "cdumps"),
        )
    )
    found = shown(f"{frames('/w/main.py')}{pxi}AttributeError: Can't pickle local object\n")
    assert (found.place, found.traceback[1:3]) == (
        "/w/main.py:0",
        ('  File "/w/main.py", line 0, in f', "    f()"),
    )


@pytest.mark.parametrize("file", ["/jobs/x/fast.pyx", "/jobs/x/app.pyz/run.py", "/jobs/x/bin/run"])
def test_place_may_be_any_file_of_the_programs_folder(file: str) -> None:
    found = shown(frames("/jobs/x/main.py", file) + "ValueError: x\n", folder="/jobs/x")
    assert found.place == f"{file.removeprefix('/jobs/x/')}:1"


@pytest.mark.parametrize(("file", "place"), [("<stdin>", "<stdin>:0"), ("<string>", "")])
def test_place_of_a_script_without_a_file(file: str, place: str) -> None:
    """A line number of `python -c`, or of generated code, tells nothing."""
    assert shown(frames(file) + "ValueError: x\n").place == place


@pytest.mark.parametrize("own", ["", "{raised}", "epoch 1\n"])
def test_traceback_in_the_summary_of_torchrun_is_shown_once(own: str) -> None:
    """A program with @record has it there. With --redirects it is nowhere else."""
    raised = frames(f"{LIBRARY}/site-packages/torch/errors.py", "/w/train.py") + "ValueError: odd\n"
    summary = TORCHRUN.format(second=1, rank=1, host="n2", code=1)
    hint = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html\n"
    assert hint in summary
    log = own.format(raised=raised) + summary.replace(
        hint, f"{raised}\n".replace("\n", "\n  ")[:-2]
    )
    found = shown(log)
    assert (found.place, found.exception) == ("/w/train.py:1", "ValueError: odd")
    assert found.lines.count("ValueError: odd") == 1


def test_exception_that_another_process_sent_has_its_own_place() -> None:
    remote = (
        f'multiprocessing.pool.RemoteTraceback:\n"""\n{frames("/jobs/x/work.py")}KeyError: 3\n"""\n'
    )
    found = shown(f"{remote}\n{DIRECT}\n\n{frames('/jobs/x/main.py')}KeyError: 3\n")
    assert (found.place, found.chain) == ("/jobs/x/work.py:0", ())


def test_part_of_the_program_that_an_exception_ended_is_named() -> None:
    assert shown(f"Exception in thread Thread-1 (load):\n{BUG}").part == "thread Thread-1 (load)"
    assert shown(BUG).part == ""


def test_exception_that_python_ignores_is_not_the_last() -> None:
    ignored = f"Exception ignored in: <function A.__del__ at 0x1>\n{BUG}"
    found = shown(f"{TRACEBACK}ValueError: x\n{ignored}")
    assert found.exception == "ValueError: x"
    assert found.last[-1] == "KeyError: 'a bug'"


def test_carriage_return_hides_no_exception() -> None:
    assert (
        shown(f"{TRACEBACK}ValueError: shard 1\rshard 2\n").exception
        == "ValueError: shard 1 shard 2"
    )
    assert (
        shown("job.sh: line 2: $'\\r': command not found\n/x\r: not found\n").last[-1]
        == "/x\\r: not found"
    )
    assert shown(" 1%\r 2%\r 3%\r 4%\n").last == (" 4%",)


@pytest.mark.parametrize(
    ("message", "frame"),
    [
        ("java.io.IOException: no room", "\tat lib.A.write(A.java:{})"),
        ("Fortran runtime error: bad index\n\nError termination. Backtrace:", "#{}  0x7f in ???"),
        (
            "[n1:9] Signal: Bus error (7)\n[n1:9] Failing at address: 0x8",
            "[n1:9] [ {}] ./a.out(+0x1)",
        ),
        ("ERROR: LoadError: no such key\nStacktrace:", " [{}] top-level scope"),
        ("[n1:9] Caught signal 8 (divide by zero)", " {}  /lib/libucs.so.0(+0x3182f) [0x7fc5]"),
    ],
)
def test_backtrace_does_not_hide_the_message_before_it(message: str, frame: str) -> None:
    frames = "".join(f"{frame.format(number)}\n" for number in range(30))
    first, *_ = message.split("\n")
    found = shown(f"{STEPS}{message}\n{frames}")
    assert first in found.lines
    assert "[... 20 lines ...]" in found.lines
    assert len(found.lines) == 14
    after = shown(f"{BUG}{STEPS}{message}\n{frames}")
    assert first in after.lines
    assert after.between in {38, 39, 40}


def test_rest_of_an_earlier_traceback_does_not_stand_before_the_last() -> None:
    found = shown(f"{TRACEBACK}FileNotFoundError: 'cache'\n{BUG}")
    assert found.before == ()
    assert shown(f"{TRACEBACK}FileNotFoundError: 'cache'\nrebuilt\n{BUG}").before == ("rebuilt",)


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("fit: no data\nINFO closing 3 workers\n", "fit: no data"),
        (
            "lua: geo.lua:3: no cell\nstack traceback:\n\t[C]: in function 'error'\n",
            "lua: geo.lua:3: no cell",
        ),
        ("Error: no './geo'\nRequire stack:\n- /a/plot.js\n", "Error: no './geo'"),
        ("INFO step 3\n", ""),
    ],
)
def test_last_complaint_is_not_what_a_program_says_while_it_ends(log: str, line: str) -> None:
    assert shown(log).last_complaint == line


def test_line_of_zero_bytes_is_no_line() -> None:
    assert shown("message truncated\n\0").last == ("message truncated",)


def test_indented_lines_of_a_log_are_no_backtrace() -> None:
    assert len(shown("table:\n" + STEPS.replace("step", "  step")).lines) == 10


def test_colors_hide_no_exception() -> None:
    """As Python 3.13 writes a traceback with PYTHON_COLORS=1 or FORCE_COLOR."""
    log = (
        "Traceback (most recent call last):\n"
        '  File \x1b[35m"/w/a.py"\x1b[0m, line \x1b[35m7\x1b[0m, in \x1b[35m<module>\x1b[0m\n'
        "    \x1b[31mmain\x1b[0m\x1b[1;31m()\x1b[0m\n"
        "\x1b[1;35mValueError\x1b[0m: \x1b[35modd\x1b[0m\n"
    )
    found = shown(log)
    assert (found.exception, found.place) == ("ValueError: odd", "/w/a.py:7")


def test_messages_of_launchers_are_shown_only_if_there_is_nothing_else() -> None:
    message = "srun: error: n2: task 1: Exited with exit code 1\n"
    assert shown(f"epoch 1\n{message}").last == ("epoch 1",)
    assert shown(message).last == (message.strip(),)
