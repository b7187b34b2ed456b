"""The screen of `top`, as text."""

from __future__ import annotations

import os
import pty
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from clusterctl.cli import top
from clusterctl.cli.all_clusters import ClusterAnswers
from clusterctl.cli.output import Screen
from clusterctl.cli.top import ScreenSection, TopView, fit, lines_of, sparkline
from clusterctl.errors import UnreachableError
from clusterctl.jobs.readings import GpuUse, JobUse, MetricValue, NodeUse, Progress, RankUse
from clusterctl.jobs.top import ClusterMoment
from clusterctl.scheduler.base import JobInfo, JobState, NodeInfo
from clusterctl.scheduler.history import Hang
from clusterctl.scheduler.slurm.parse import PartitionInfo

TEXT = Screen(json=False, color=False)
GIB = 1024
EVERYTHING = 1000


def node(number: int, shown: str = "idle", **fields: Any) -> NodeInfo:
    return NodeInfo(f"n{number}", shown, fields.pop("reason", ""), 8, 64 * GIB, "", (), **fields)


def job(number: int, state: JobState = JobState.RUNNING, **fields: Any) -> JobInfo:
    name = fields.pop("name", "train")
    reason = fields.pop("reason", "")
    return JobInfo(number=number, name=name, user="hpc", state=state, reason=reason, **fields)


GPUS = tuple(GpuUse(index, 90.0 + index, 40 * GIB, 80 * GIB, 300.0, 1) for index in (0, 1))
USE = JobUse(
    id="7",
    nodes=(NodeUse("n1", 55.0, 10 * GIB, 64 * GIB, 2048.0, 1048576.0, GPUS),),
    ranks=tuple(
        RankUse(rank, "n1", 99.0 - rank, 3 * GIB, GPUS[rank : rank + 1]) for rank in (0, 1)
    ),
    progress=Progress(
        MetricValue("step", 410),
        MetricValue("loss", 0.41234567),
        MetricValue("samples_per_s", 12345.6),
        (3, 2, 1),
    ),
    log=("epoch 1", "epoch 2"),
)
RUNNING = ClusterMoment(
    cluster="lab",
    asked_s=12.3,
    pace_s=30.0,
    nodes=(
        replace(node(1, "mixed"), gres="gpu:h100:2(S:0-1)", gres_used="gpu:h100:2(IDX:0-1)"),
        node(2, load=0.25),
        node(3, "down*", reason="Not responding"),
    ),
    jobs=(
        job(8, JobState.PENDING, reason="Resources"),
        job(7, nodes=("n1",), start_time=100, end_time=180),
    ),
    uses={"7": USE},
)


def drawn(
    moment: ClusterMoment, height: int = EVERYTHING, choice: TopView | None = None
) -> list[str]:
    looks = ClusterAnswers({"lab": moment}, {})
    view = choice or TopView().moved(looks.found)
    # The time of day is not part of what is tested.
    return [re.sub(r"\d\d:\d\d:\d\d   Slurm", "TIME   Slurm", line)
            for line in lines_of(TEXT, looks, view, height)]  # fmt: skip


def test_screen_of_a_running_job() -> None:
    assert drawn(RUNNING) == [
        "lab   TIME   Slurm was asked 12 s ago, at most every 30 s on average",
        "",
        "OUT OF SERVICE  STATE  REASON",
        "n3              down*  Not responding",
        "",
        "NODE  STATE  CPUS  CPU       MEMORY            GPUS  GPU     POWER  IN       OUT",
        "n1    mixed  0/8   55 %      10 GiB of 64 GiB  2/2   90.5 %  600 W  2 KiB/s  1 MiB/s",
        "n2    idle   0/8   load 0.2  of 64 GiB",
        "",
        "   JOB  NAME   STATE    NODES  TIME   CPU     GPU     STEP  LOSS      SPEED     REASON",
        ">  7    train  RUNNING  n1     1m20s  98.5 %  90.5 %  410   0.412346  12,345.6",
        "   8    train  PENDING                                                          Resources",
        "",
        "job 7 (train)",
        "step 410   loss 0.412346   samples_per_s 12,345.6",
        "last 3 values of loss: █▄▁",
        "",
        "RANK  NODE  CPU   MEMORY  GPU  USE   GPU MEMORY        POWER",
        "0     n1    99 %  3 GiB   0    90 %  40 GiB of 80 GiB  300 W",
        "1     n1    98 %  3 GiB   1    91 %  40 GiB of 80 GiB  300 W",
        "",
        "log:",
        "| epoch 1",
        "| epoch 2",
    ]


def test_hang_and_nodes_without_telemetry_are_said() -> None:
    hang = Hang(summary="rank 0 on n1 is waiting in MPI", since=10.0, noticed=70.0, until=100.0)
    use = replace(USE, hang=hang, silent=("n2", "n3"), ranks=())
    lines = drawn(replace(RUNNING, uses={"7": use}))
    assert "hangs: no progress for 1m30s: rank 0 on n1 is waiting in MPI" in lines
    assert "no recent telemetry of n[2-3]" in lines
    # At the left, where a narrow terminal shows it.
    assert "  RUNNING, hangs  " in next(line for line in lines if line.startswith(">  7"))


def test_array_has_one_line_and_its_running_tasks_below() -> None:
    tasks = [job(9, task=task, nodes=("n1",)) for task in (0, 1)]
    waiting = [job(9, JobState.PENDING, task=task) for task in (2, 3)]
    use = replace(USE, id="9_0")
    uses = {"9_0": use, "9_1": replace(use, id="9_1", ranks=())}
    lines = drawn(ClusterMoment("lab", jobs=(*tasks, *waiting), uses=uses))
    assert [line.split("  ")[0] for line in lines if line.startswith("9")] == [
        "9 (4 tasks)",
        "9_0",
        "9_1",
    ]
    assert "2 RUNNING, 2 PENDING" in next(line for line in lines if line.startswith("9 (4"))


def test_cluster_of_other_people_has_partitions_and_the_nodes_of_ones_own_jobs() -> None:
    partition = PartitionInfo("gpu", True, True, "1-00:00:00", 3, 1, 0, 4)
    lines = drawn(
        ClusterMoment("lab", partitions=(partition,), jobs=RUNNING.jobs, uses=RUNNING.uses)
    )
    assert lines[2].split() == ["NODE", "CPU", "MEMORY", "GPU", "POWER", "IN", "OUT"]
    assert lines[5].startswith("PARTITION")


def test_cluster_that_does_not_answer_hides_no_other() -> None:
    error = UnreachableError("far: no route to host", fix="try `ssh far`")
    looks = ClusterAnswers({"lab": RUNNING}, {"far": error})
    lines = lines_of(TEXT, looks, TopView().moved(looks.found), EVERYTHING)
    assert lines[:2] == ["far: far: no route to host", "fix: try `ssh far`"]
    assert "job 7 (train)" in lines


@pytest.mark.parametrize("height", [23, 12, 6, 1])
def test_screen_is_never_higher_than_the_terminal(height: int) -> None:
    many = tuple(node(number) for number in range(64))
    use = replace(USE, log=tuple(map(str, range(30))))
    moment = replace(RUNNING, nodes=many, uses={"7": use})
    lines = drawn(moment, height)
    assert len(lines) <= height
    assert lines[0].startswith("lab")


def test_long_sections_are_cut_first_and_a_log_at_its_beginning() -> None:
    sections = [
        ScreenSection(("short",), ("a", "b")),
        ScreenSection(("long",), tuple("cdefgh")),
        ScreenSection(("log",), tuple("ijklmn"), keeps_end=True),
    ]
    lines = ["short", "a", "b", "long", "c", "d", "... 4 more", "log", "l", "m", "n"]
    assert fit(sections, 11) == lines
    # The rest of the room is for the section that needs least of it.
    assert fit(sections, 12) == [*lines[:5], "d", "e", "... 3 more", *lines[7:]]
    assert len(fit(sections, 40)) == 3 + 14 + 2


def test_small_sections_are_whole_before_a_long_one_gets_more() -> None:
    tables = [ScreenSection((name,), (f"{name}1", f"{name}2")) for name in ("a", "b")]
    log = ScreenSection(("log",), tuple("0123456789"), keeps_end=True)
    assert fit([*tables, log], 9) == ["a", "a1", "a2", "b", "b1", "b2", "log", "8", "9"]
    assert fit([*tables, log], 8) == ["a", "a1", "a2", "b", "b1", "b2", "log", "9"]


def test_choice_moves_between_jobs_and_starts_at_the_first_that_runs() -> None:
    looks = {"lab": RUNNING}
    first = TopView().moved(looks)
    assert first == TopView("lab", "7")
    assert first.moved(looks, 1) == TopView("lab", "8")
    assert first.moved(looks, -1) == first
    waiting = drawn(RUNNING, choice=TopView("lab", "8"))
    assert waiting[-1] == "job 8 (train): PENDING (Resources)"
    assert TopView("lab", "gone").moved(looks) == first
    assert first.moved({"lab": ClusterMoment("lab")}) == TopView()


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 8, "▁▂▃▄▅▆▇█"),
        ([0.0, 0.0, 7.0, 7.0], 2, "▁█"),
        ([5.0, 5.0], 40, "▁▁"),
        # Their sum and their difference are too large for a float.
        ([-1.7e308, 1.7e308] * 2, 4, "▁█▁█"),
        ([1e308] * 40, 5, "▁▁▁▁▁"),
        ([0.0, 0.0], 40, "▁▁"),
    ],
)
def test_curve_has_a_block_for_each_part_of_the_values(
    values: list[float], width: int, line: str
) -> None:
    assert sparkline(values, width) == line


def test_terminal_that_is_closed_meanwhile_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a window is while `top` runs: its settings can't be restored."""
    window, terminal = pty.openpty()
    with open(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with top._keyboard():
            os.close(window)


def test_chosen_row_stays_if_a_table_is_cut() -> None:
    rows = tuple(map(str, range(30)))
    assert ScreenSection(("head",), rows, chosen=20).cut(4) == [
        "head",
        "18",
        "19",
        "20",
        "... 27 more",
    ]


def test_huge_figures_are_short() -> None:
    progress = Progress(loss=MetricValue("loss", 1e308), speed=MetricValue("x_per_s", 123456.7))
    lines = drawn(replace(RUNNING, uses={"7": replace(USE, progress=progress)}))
    assert "loss 1e+308   x_per_s 123,457" in lines


def many_nodes() -> ClusterMoment:
    """64 nodes, of which three are drained and one is down; an array of the user on 40 of them, a
    training on four, and jobs of another user.
    """
    out = {50: "ECC errors", 51: "ECC errors", 52: "ECC errors", 60: "power supply"}
    states = {50: "idle+drain", 51: "idle+drain", 52: "idle+drain", 60: "down"}
    nodes = tuple(
        node(
            number,
            states.get(number, "allocated" if number <= 46 else "idle"),
            allocated_cpus=8 if number <= 46 else 0,
            reason=out.get(number, ""),
        )
        for number in range(1, 65)
    )
    tasks = [job(9, task=task, nodes=(f"n{task}",), name="sweep") for task in range(1, 41)]
    training = job(12, nodes=("n41", "n42", "n43", "n44"), start_time=100, end_time=180)
    others = [
        replace(job(number, state, name="md"), user="eve", nodes=nodes)
        for number, state, nodes in (
            (14, JobState.RUNNING, ("n45", "n46")),
            (13, JobState.PENDING, ()),
            (11, JobState.PENDING, ()),
            (8, JobState.PENDING, ()),
        )
    ]
    uses = {
        each.id: JobUse(
            each.id,
            tuple(NodeUse(name, 97.0, 9 * GIB, 64 * GIB, 2048.0, 1024.0) for name in each.nodes),
        )
        for each in (*tasks, training)
    }
    jobs = (*others, training, job(10, JobState.PENDING, reason="Priority"), *tasks)
    return ClusterMoment("big", user="hpc", asked_s=4.0, nodes=nodes, jobs=jobs, uses=uses)


@pytest.fixture
def shown_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return a function that returns the lines of the screen with so many columns and rows."""

    def shown_at(columns: int, rows: int, moment: ClusterMoment, chosen: str = "") -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("LINES", str(rows))
        looks = ClusterAnswers({moment.cluster: moment}, {})
        view = TopView(moment.cluster, chosen) if chosen else TopView().moved(looks.found)
        lines = top._screenful(TEXT, looks, view, [])
        return [re.sub(r"\d\d:\d\d:\d\d   Slurm", "TIME   Slurm", line) for line in lines]

    return shown_at


def test_screen_of_64_nodes_tells_first_what_is_out_of_service(shown_at) -> None:
    """What does not fit is counted by state. The user's own jobs come before those of others."""
    assert shown_at(80, 24, many_nodes()) == [
        "big   TIME   Slurm was asked 4 s ago",
        "OUT OF SERVICE  STATE       REASON",
        "n[50-52]        idle+drain  ECC errors",
        "n60             down        power supply",
        "NODE  STATE      CPUS  CPU   MEMORY           IN       OUT",
        "n41   allocated  8/8   97 %  9 GiB of 64 GiB  2 KiB/s  1 KiB/s",
        "n42   allocated  8/8   97 %  9 GiB of 64 GiB  2 KiB/s  1 KiB/s",
        "n43   allocated  8/8   97 %  9 GiB of 64 GiB  2 KiB/s  1 KiB/s",
        "n44   allocated  8/8   97 %  9 GiB of 64 GiB  2 KiB/s  1 KiB/s",
        "n1    allocated  8/8   97 %  9 GiB of 64 GiB  2 KiB/s  1 KiB/s",
        "n2    allocated  8/8   97 %  9 GiB of 64 GiB  2 KiB/s  1 KiB/s",
        "n3    allocated  8/8   97 %  9 GiB of 64 GiB  2 KiB/s  1 KiB/s",
        "n4    allocated  8/8   97 %  9 GiB of 64 GiB  2 KiB/s  1 KiB/s",
        "... 52 more: 38 allocated, 14 idle",
        "   JOB           NAME   USER  STATE       NODES     TIME   REASON",
        ">  12            train  hpc   RUNNING     n[41-44]  1m20s",
        "   9 (40 tasks)  sweep  hpc   40 RUNNING  n[1-40]",
        "   10            train  hpc   PENDING                      Priority",
        "   14            md     eve   RUNNING     n[45-46]",
        "   13            md     eve   PENDING",
        "   11            md     eve   PENDING",
        "   8             md     eve   PENDING",
        "job 12 (train)",
        "q: quit   ↑ ↓: choose a job   space: look now",
    ]


def test_lines_that_a_narrow_terminal_cuts_end_with_an_ellipsis(shown_at) -> None:
    wide = shown_at(200, 50, many_nodes())
    narrow = shown_at(40, 50, many_nodes())
    assert max(map(len, narrow)) == 39
    pairs = [*zip(wide, narrow, strict=True)]
    assert all(line == whole or line.endswith("…") for whole, line in pairs)
    assert any(line.endswith("…") for line in narrow)


def test_screen_of_64_nodes_on_a_large_terminal_has_all_columns(shown_at) -> None:
    lines = shown_at(200, 50, many_nodes(), "9")
    assert [line.split()[0] for line in lines if line.startswith("n")][:4] == [
        "n[50-52]",
        "n60",
        "n1",
        "n2",
    ]
    assert [line for line in lines if line.startswith("...")] == [
        "... 44 more: 30 allocated, 14 idle",
        "... 23 more",
    ]
    assert len(lines) <= 50


def test_chosen_job_is_marked_on_its_own_cluster_only() -> None:
    looks = ClusterAnswers({"lab": RUNNING, "far": replace(RUNNING, cluster="far")}, {})
    lines = lines_of(TEXT, looks, TopView("far", "7"), EVERYTHING)
    begin = lines.index(next(line for line in lines if line.startswith("far")))
    assert [at > begin for at, line in enumerate(lines) if line.startswith(">")] == [True]


def test_rows_that_are_left_out_are_counted_by_kind() -> None:
    section = ScreenSection(
        ("head",), tuple("abcde"), kinds=("idle", "idle", "down", "down", "idle")
    )
    assert section.cut(3) == ["head", "a", "b", "... 3 more: 2 down, 1 idle"]


def test_top_prints_once_on_a_terminal_that_cannot_be_redrawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(top, "_watches", lambda *_: {})
    monkeypatch.setattr(top, "_look", lambda _: ClusterAnswers({"lab": RUNNING}, {}))
    monkeypatch.delattr(top, "_show")
    top.top(TEXT)
    assert "lab" in capsys.readouterr().out
