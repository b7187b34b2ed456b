"""The command top, which shows live what nodes, jobs and their ranks do."""

from __future__ import annotations

import os
import select
import shutil
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Annotated, Final

from rich.cells import cell_len, set_cell_size

from clusterctl.cli.all_clusters import ClusterAnswers, all_clusters, are_all, ask_all
from clusterctl.cli.jobs import partition_table
from clusterctl.cli.messages import Notify, telling
from clusterctl.cli.options import Words, argument, job_ids, option
from clusterctl.cli.output import ENDINGS, Screen, can_draw
from clusterctl.errors import SchedulerError, TransportError, UsageError, excluded, printable
from clusterctl.jobs.messages import JobMessages, chosen_receivers
from clusterctl.jobs.readings import GpuUse, JobUse, MetricValue, NodeUse, RankUse
from clusterctl.jobs.top import ClusterMoment, ClusterWatch, watching
from clusterctl.scheduler.base import (
    JobInfo,
    JobState,
    NodeInfo,
    elapsed_of,
    state_counts,
    worst_job,
)
from clusterctl.scheduler.slurm.values import fold_nodes, gpu_count
from clusterctl.state.run_names import cluster_of_jobs
from clusterctl.util import formatting
from clusterctl.util.numbers import counted

_CURVE: Final = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH: Final = 40
_INTERVAL_S: Final = 2.0
# Without a terminal there is no height, so nothing is left out.
_ANY_HEIGHT: Final = 1 << 30
_MIB: Final = 1 << 20
_KEYS: Final = "q: quit   ↑ ↓: choose a job   space: look now"
# The characters that terminals send for keys.
_UP: Final = ("\x1b[A", "\x1bOA", "k")
_DOWN: Final = ("\x1b[B", "\x1bOB", "j")


@dataclass(frozen=True, slots=True)
class ScreenSection:
    """Lines of the screen that belong together. keeps_end: if it is cut, the last rows stay.

    chosen: the number of the row that stays. kinds: the kind of each row, such as a node's state;
        rows that are left out are counted by kind. Empty: the rows have no kinds.
    """

    head: tuple[str, ...]
    rows: tuple[str, ...] = ()
    keeps_end: bool = False
    chosen: int = 0
    kinds: tuple[str, ...] = ()

    def cut(self, rows: int) -> list[str]:
        """Return the section with at most this number of rows."""
        left_out = len(self.rows) - rows
        if left_out <= 0:
            return [*self.head, *self.rows]
        if self.keeps_end:
            return [*self.head, *self.rows[len(self.rows) - rows :]]
        most = max(0, rows - 1)
        begin = max(0, self.chosen - most + 1)
        kept = self.rows[begin : begin + most]
        if not rows:
            return [*self.head]
        counts = Counter([*self.kinds[:begin], *self.kinds[begin + most :]])
        text = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        more = f"... {len(self.rows) - len(kept)} more"
        return [*self.head, *kept, f"{more}: {text}" if text else more]


@dataclass(frozen=True, slots=True)
class TopView:
    """The user's choice: the job (or array) that is shown in detail. "": no job."""

    cluster: str = ""
    job: str = ""

    def moved(self, moments: Mapping[str, ClusterMoment], step: int = 0) -> TopView:
        """Return the choice ``step`` jobs further. A job that is not there any more is replaced by
        the first that runs.
        """
        jobs = [
            TopView(name, tasks[0].whole_id)
            for name, moment in moments.items()
            for tasks in _groups(moment)
        ]
        if not jobs:
            return TopView()
        if self not in jobs:
            return jobs[0]
        return jobs[min(max(0, jobs.index(self) + step), len(jobs) - 1)]


def _groups(moment: ClusterMoment) -> list[list[JobInfo]]:
    """Return the jobs, each with its tasks: the user's own before those of other users, of these
    those that run before those that wait, and at last those that have ended.
    """
    groups = [list(group) for _, group in groupby(moment.jobs, key=lambda job: job.whole_id)]
    return sorted(
        groups,
        key=lambda group: (
            all(job.ended for job in group),
            group[0].user != moment.user,
            not any(job.state is JobState.RUNNING for job in group),
        ),
    )


def _state_of_group(group: Sequence[JobInfo]) -> JobState:
    """Return RUNNING if a task runs, or else that of a task that waits, or else the worst."""
    states = [job.state for job in group]
    if JobState.RUNNING in states:
        return JobState.RUNNING
    return next((job.state for job in group if not job.ended), worst_job(group).state)


def top(
    screen: Screen,
    ids: Annotated[Words, argument("Show only these jobs.", metavar="[ID...]", tab=job_ids)] = None,
    once: Annotated[bool, option("Print the state once, and end.")] = False,
    interval: Annotated[
        float | None,
        option("Seconds between two looks. Default: 2.", metavar="S", least=0.5, most=3600),
    ] = None,
    notify: Notify = None,
) -> None:
    """Show live what nodes, jobs and their ranks do. It ends with q or Ctrl-C.

    Telemetry, metrics and logs of your running jobs are read from their folders by one connection.
    Slurm itself is asked at most as often as the screen tells. Without a terminal that can be
    redrawn (TERM=dumb can't), prints the state once; with IDs, --interval or --notify, a line for
    each running job and look.

    `--cluster all` shows all your clusters that are up.
    """
    is_live = sys.stdout.isatty() and can_draw()
    is_once = screen.json or once or not (is_live or ids or interval is not None or notify)
    if notify and is_once:
        raise excluded("--notify", "--once" if once else "-o json")
    with ExitStack() as stack:
        receivers = () if is_once else chosen_receivers(notify or ())
        told = stack.enter_context(telling(screen, receivers))
        watches = _watches(screen, stack, ids or [], told)
        if is_once:
            looks = _look(watches)
            view = TopView().moved(looks.found)
            lines = [] if screen.json else lines_of(screen, looks, view, _ANY_HEIGHT)
            moments = [moment.as_dict() for moment in looks.found.values()]
            screen.result({"clusters": moments, "unanswered": looks.unanswered()}, *lines)
            return
        # The user ends the command by Ctrl-C or a signal.
        with suppress(*ENDINGS):
            look = _show if is_live else _print
            look(screen, watches, interval or _INTERVAL_S, told)


def _watches(
    screen: Screen, stack: ExitStack, ids: Sequence[str], told: JobMessages
) -> dict[str, ClusterWatch]:
    """Open the chosen cluster, or all clusters. Return name -> watch."""
    if are_all(screen, ids):
        return {
            name: stack.enter_context(watching(chosen.workspace(), told=told.of_cluster()))
            for name, chosen in all_clusters(screen).items()
        }
    workspace = cluster_of_jobs(ids, screen.chosen()).workspace()
    return {workspace.root.name: stack.enter_context(watching(workspace, ids, told))}


Looks = ClusterAnswers[ClusterMoment]


def _look(watches: Mapping[str, ClusterWatch]) -> Looks:
    """Look at all clusters at once. Raises the error if none answers, or if the command is wrong."""
    looks = ask_all([*watches], lambda name: watches[name].look())
    for error in looks.errors.values():
        if isinstance(error, UsageError):
            raise error
    return looks


def _print(
    screen: Screen, watches: Mapping[str, ClusterWatch], interval_s: float, told: JobMessages
) -> None:
    """Print a line for each running job, again and again, until given jobs have ended."""
    has_looked = False
    while True:
        try:
            lines = _plain_lines(_look(watches))
        except (TransportError, SchedulerError) as exc:
            if not has_looked:
                raise
            lines = [f"{time.strftime('%H:%M:%S')} no answer: {exc.what}"]
        has_looked = True
        screen.result({}, *lines)
        screen.note(*told.failures())
        if all(watch.has_ended for watch in watches.values()):
            return
        time.sleep(interval_s)


def _plain_lines(looks: Looks) -> list[str]:
    now = time.strftime("%H:%M:%S")
    lines = [f"{now} {name}: {error.what}" for name, error in looks.errors.items()]
    prefixes = {name: f"{name}/" if len(looks.found) > 1 else "" for name in looks.found}
    for name, moment in looks.found.items():
        running = [job for job in moment.jobs if job.id in moment.uses]
        for job in running:
            cells = zip(_USE, _use(moment.uses[job.id]), strict=True)
            figures = ", ".join(f"{head} {cell}" for head, cell in cells if cell)
            lines.append(f"{now} job {prefixes[name]}{job.id} ({job.name}) {figures}".rstrip())
        if not running:
            lines.append(f"{now} {name}: no job of yours is running")
    return lines


def _show(
    screen: Screen, watches: Mapping[str, ClusterWatch], interval_s: float, told: JobMessages
) -> None:
    """Draw the screen again and again until the user ends it, or given jobs have ended."""
    view = TopView()
    looks: Looks = ClusterAnswers({}, {})
    # The screen shows the last of them; they are printed when it has gone.
    unsent: list[str] = []
    with ExitStack() as stack:
        stack.callback(lambda: screen.note(*unsent))
        keys = stack.enter_context(_keyboard())
        draw = stack.enter_context(screen.redrawing())
        while True:
            failure = ""
            try:
                looks = _look(watches)
            except (TransportError, SchedulerError) as exc:
                # The last state stays on the screen, with the reason why it is old.
                if not looks.found:
                    raise
                failure = f"no answer: {exc.what}"
            unsent += told.failures()
            if all(watch.has_ended for watch in watches.values()):
                return
            deadline = time.monotonic() + interval_s
            key = _UP[0]
            step = 0
            while key in _UP or key in _DOWN:
                view = view.moved(looks.found, step)
                draw(_screenful(screen, looks, view, [failure, *unsent[-1:]]))
                key = keys(deadline - time.monotonic())
                step = 1 if key in _DOWN else -1
            if key == "q":
                return


def _screenful(screen: Screen, looks: Looks, view: TopView, first: Sequence[str]) -> list[str]:
    """Return the lines that fit on the terminal. first: lines at the top. "" is left out."""
    size = shutil.get_terminal_size()
    above = [printable(line) for line in first if line]
    lines = [*above, *lines_of(screen, looks, view, size.lines - 1 - len(above)), _KEYS]
    return [_narrowed(line, size.columns - 1) for line in lines]


def _narrowed(line: str, width: int) -> str:
    """Return a line of at most this width. A line that is cut ends with an ellipsis."""
    if cell_len(line) <= width:
        return line
    return f"{set_cell_size(line, max(0, width - 1)).rstrip()}…"


@contextmanager
def _keyboard() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits so many seconds for a key, and returns the characters that the
    terminal sends for it. "": no key was pressed.
    """
    if not sys.stdin.isatty():
        yield partial(_key, [])
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    # Keys are read one by one and not shown; Ctrl-C still interrupts.
    tty.setcbreak(fd)
    try:
        yield partial(_key, [fd])
    finally:
        # A terminal that was closed has no settings any more, and shows no output to wait for.
        with suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSANOW, before)


def _key(inputs: Sequence[int], seconds: float) -> str:
    """Wait for a key. inputs: the descriptor of the terminal, or empty."""
    ready, _, _ = select.select(inputs, [], [], max(0.0, seconds))
    return os.read(ready[0], 16).decode(errors="replace") if ready else ""


def lines_of(screen: Screen, looks: Looks, view: TopView, height: int) -> list[str]:
    """Return the lines of the screen, at most ``height``."""
    sections = [
        ScreenSection((f"{name}: {error.what}", f"fix: {error.fix}"))
        for name, error in looks.errors.items()
    ]
    for name, moment in looks.found.items():
        is_marked = name == view.cluster and len(_groups(moment)) > 1
        sections += _cluster_sections(screen, moment, view.job if is_marked else "")
    chosen = looks.found.get(view.cluster)
    if chosen is not None and view.job:
        is_only = len(looks.found) == 1
        sections += _job_sections(screen, chosen, view.job, "" if is_only else f"{view.cluster}/")
    return fit(sections, height)


def fit(sections: Sequence[ScreenSection], height: int) -> list[str]:
    """Return the lines of sections, at most ``height`` lines.

    The sections have empty lines between them if all rows fit. Otherwise rows are left out of the
    longest sections first.
    """
    numbers = [len(section.rows) for section in sections]
    heads = sum(len(section.head) for section in sections)
    has_gaps = heads + sum(numbers) + len(sections) - 1 <= height
    lines: list[str] = []
    for section, rows in zip(sections, _shares(numbers, height - heads), strict=True):
        lines += [*([""] if lines and has_gaps else []), *section.cut(rows)]
    return lines[: max(0, height)]


def _shares(numbers: Sequence[int], room: int) -> list[int]:
    """Return how many of these numbers of rows are shown, so that they fit into ``room`` lines."""
    most = max(numbers, default=0)
    while most and sum(min(most, number) for number in numbers) > room:
        most -= 1
    shares = [min(most, number) for number in numbers]
    left = max(0, room - sum(shares))
    # The rest goes to the sections that need least of it, so that they are whole.
    for at in sorted(range(len(numbers)), key=lambda at: numbers[at]):
        added = min(left, numbers[at] - shares[at])
        shares[at] += added
        left -= added
    return shares


def _cluster_sections(
    screen: Screen, moment: ClusterMoment, chosen: str
) -> Iterator[ScreenSection]:
    """Yield the sections about a cluster. chosen: the marked job. "": no job is marked."""
    asked = f"Slurm was asked {moment.asked_s:.0f} s ago"
    pace = f", at most every {moment.pace_s:.0f} s on average" if moment.pace_s else ""
    yield ScreenSection((f"{moment.cluster}   {time.strftime('%H:%M:%S')}   {asked}{pace}",))
    if out := _out_of_service(moment.nodes):
        head, *rows = screen.table(["OUT OF SERVICE", "STATE", "REASON"], out)
        yield ScreenSection((head,), tuple(rows))
    nodes, uses = _shown_nodes(moment, chosen)
    if nodes:
        cells = [_node_row(name, node, uses.get(name)) for name, node in nodes.items()]
        states = [node.shown if node is not None else "unknown" for node in nodes.values()]
        kinds = states if moment.nodes else ()
        yield _table(screen, _NODE, cells, kinds=kinds)
    if moment.partitions:
        head, *rows = partition_table(screen, moment.partitions)
        yield ScreenSection((head,), tuple(rows))
    if moment.jobs:
        at = _place(moment, chosen)
        kinds = [_state_of_group(jobs).value for jobs in _groups(moment)]
        yield _table(screen, *_job_table(moment, chosen), chosen=at, kinds=kinds)
    else:
        # On clusters of other people, only the user's own jobs are listed.
        yield ScreenSection(("no jobs of yours" if moment.partitions else "no jobs",))
    if moment.unread:
        yield ScreenSection((f"not read: {counted(moment.unread, 'more running job')}",))


def _place(moment: ClusterMoment, chosen: str) -> int:
    """Return the number of the chosen job in the table; 0 if it is not there."""
    ids = [tasks[0].whole_id for tasks in _groups(moment)]
    return ids.index(chosen) if chosen in ids else 0


def _table(
    screen: Screen,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    chosen: int = 0,
    kinds: Iterable[str] = (),
) -> ScreenSection:
    """Return a table without the columns of which all cells are empty. chosen, kinds: see
    ``ScreenSection``.
    """
    kept = [at for at in range(len(heads)) if any(row[at] for row in rows)]
    cells = [[row[at] for at in kept] for row in rows]
    head, *lines = screen.table([heads[at] for at in kept], cells)
    return ScreenSection((head,), tuple(lines), chosen=chosen, kinds=tuple(kinds))


def _out_of_service(nodes: Sequence[NodeInfo]) -> list[list[str]]:
    """Return a row for all nodes that can't be used in the same state and for the same reason."""
    names: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        if not node.usable:
            names.setdefault((node.shown, node.reason), []).append(node.name)
    return [[fold_nodes(same), state, reason] for (state, reason), same in names.items()]


def _shown_nodes(
    moment: ClusterMoment, chosen: str
) -> tuple[dict[str, NodeInfo | None], dict[str, NodeUse]]:
    """Return name -> node, and name -> use, of the nodes that can be used or run jobs of the user.

    Those of the chosen job come first, then those of the user's other jobs.
    """
    known = {node.name: node for node in moment.nodes}
    uses = {use.node: use for job in moment.uses.values() for use in job.nodes}
    own = {name for job in moment.jobs if job.whole_id == chosen for name in job.nodes}
    usable = {name: node for name, node in known.items() if node.usable}
    names = sorted({**usable, **uses}, key=lambda name: (name not in own, name not in uses))
    return {name: known.get(name) for name in names}, uses


def _node_row(name: str, node: NodeInfo | None, use: NodeUse | None) -> list[str]:
    cpu = ""
    memory = ""
    if use is not None:
        cpu = _percent(use.cpu_percent)
        memory = _of(use.memory_mib, use.memory_total_mib or (node.memory_mib if node else None))
    elif node is not None:
        cpu = "" if node.load is None else f"load {node.load:.1f}"
        memory = f"of {_size(node.memory_mib)}"
    gpus = use.gpus if use is not None else ()
    total = gpu_count(node.gres) if node is not None else 0
    return [
        name,
        node.shown if node is not None else "",
        f"{'?' if node.allocated_cpus is None else node.allocated_cpus}/{node.cpus}"
        if node is not None
        else "",
        cpu,
        memory,
        f"{gpu_count(node.gres_used)}/{total}" if node is not None and total else "",
        _percent(_mean([gpu.percent for gpu in gpus])),
        _watts(gpus),
        _rate(use.rx_bytes_per_s if use is not None else None),
        _rate(use.tx_bytes_per_s if use is not None else None),
    ]


_NODE: Final = (
    "NODE",
    "STATE",
    "CPUS",
    "CPU",
    "MEMORY",
    "GPUS",
    "GPU",
    "POWER",
    "IN",
    "OUT",
)
# The columns for the activity of a running job.
_USE: Final = ("CPU", "GPU", "STEP", "LOSS", "SPEED")


def _use(use: JobUse) -> list[str]:
    """Return the cells of ``_USE``. The CPU is the mean of the ranks, of a core each."""
    progress = use.progress
    gpus = [gpu for rank in use.ranks for gpu in rank.gpus]
    return [
        _percent(_mean([rank.cpu_percent for rank in use.ranks])),
        _percent(_mean([gpu.percent for gpu in gpus])),
        _value(progress.step),
        _value(progress.loss),
        _value(progress.speed),
    ]


def _job_table(moment: ClusterMoment, chosen: str) -> tuple[list[str], list[list[str]]]:
    several = len({job.user for job in moment.jobs}) > 1
    heads = ["", "JOB", "NAME", "USER", "STATE", "NODES", "TIME", *_USE, "REASON"]
    rows = []
    for jobs in _groups(moment):
        job = worst_job(jobs)
        uses = [moment.uses[each.id] for each in jobs if each.id in moment.uses]
        elapsed_s = elapsed_of(jobs)
        rows.append(
            [
                ">" if job.whole_id == chosen else "",
                f"{job.whole_id} ({len(jobs)} tasks)" if len(jobs) > 1 else job.id,
                job.name,
                job.user if several else "",
                _state(jobs, uses),
                fold_nodes([*dict.fromkeys(node for each in jobs for node in each.nodes)]),
                "" if elapsed_s is None else formatting.duration(elapsed_s),
                *(_use(uses[0]) if len(uses) == 1 else [""] * len(_USE)),
                "" if job.ended else job.reason,
            ]
        )
    return heads, rows


def _state(jobs: Sequence[JobInfo], uses: Sequence[JobUse]) -> str:
    """Return the state of a job or array and, in a word, the problem of its running tasks."""
    state = state_counts(jobs) if len(jobs) > 1 else jobs[0].state.value
    hangs = ["hangs"] if any(use.hang for use in uses) else []
    kinds = dict.fromkeys(alarm.kind for use in uses for alarm in use.alarms)
    return ", ".join([state, *hangs, *kinds])


def _job_sections(
    screen: Screen, moment: ClusterMoment, job_id: str, prefix: str
) -> Iterator[ScreenSection]:
    """Yield the sections about a job, or about an array with the tasks that run. prefix: of its ID."""
    jobs = [job for job in moment.jobs if job.whole_id == job_id]
    uses = [moment.uses[job.id] for job in jobs if job.id in moment.uses]
    if not uses:
        for job in jobs[:1]:
            reason = f" ({job.reason})" if job.reason else ""
            yield ScreenSection((f"job {prefix}{job.id} ({job.name}): {job.state.value}{reason}",))
        return
    if len(jobs) > 1:
        nodes = {job.id: fold_nodes(list(job.nodes)) for job in jobs}
        rows = [[use.id, nodes[use.id], *_use(use)] for use in uses]
        yield _table(screen, ["TASK", "NODES", *_USE], rows)
        return
    use = uses[0]
    title = [f"job {prefix}{use.id} ({jobs[0].name})", *_progress_lines(use)]
    yield ScreenSection(tuple(title))
    if use.ranks:
        heads = ["RANK", "NODE", "CPU", "MEMORY", "GPU", "USE", "GPU MEMORY", "POWER"]
        yield _table(screen, heads, [_rank_row(rank) for rank in use.ranks])
    if use.silent:
        names = fold_nodes(list(use.silent))
        yield ScreenSection((f"no recent telemetry of {names}",))
    if use.log:
        yield ScreenSection(("log:",), tuple(f"| {line}" for line in use.log), keeps_end=True)


def _progress_lines(use: JobUse) -> list[str]:
    progress = use.progress
    figures = (progress.step, progress.loss, progress.speed)
    parts = [f"{figure.name} {_value(figure)}" for figure in figures if figure is not None]
    lines = ["   ".join(parts)] if parts else []
    if progress.loss is not None and len(progress.curve) > 1:
        curve = sparkline(progress.curve)
        lines.append(f"last {len(progress.curve):,} values of {progress.loss.name}: {curve}")
    hang = [f"hangs: {use.hang}"] if use.hang else []
    return [*lines, *hang, *(f"alarm: {alarm}" for alarm in use.alarms)]


def sparkline(values: Sequence[float], width: int = _CURVE_WIDTH) -> str:
    """Return a line of at most ``width`` blocks, whose heights are the means of as many parts of
    ``values``.
    """
    width = min(width, len(values))
    ends = [len(values) * at // width for at in range(width + 1)]
    # Without this, sums of huge values would overflow.
    largest = max(map(abs, values)) or 1.0
    means = [sum(value / largest for value in values[a:b]) / (b - a) for a, b in pairwise(ends)]
    low = min(means)
    span = max(means) - low
    top_block = len(_CURVE) - 1
    return "".join(_CURVE[round(top_block * (mean - low) / span) if span else 0] for mean in means)


def _rank_row(rank: RankUse) -> list[str]:
    gpus = rank.gpus
    return [
        str(rank.rank),
        rank.node,
        _percent(rank.cpu_percent),
        "" if rank.memory_mib is None else _size(rank.memory_mib),
        ",".join(str(gpu.index) for gpu in gpus),
        _percent(_mean([gpu.percent for gpu in gpus])),
        _of(_sum([gpu.memory_mib for gpu in gpus]), _sum([gpu.memory_total_mib for gpu in gpus])),
        _watts(gpus),
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _sum(values: Sequence[float | None]) -> float | None:
    """Return the sum. None: there are no values, or a value is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _percent(value: float | None) -> str:
    return "" if value is None else formatting.percent(value)


def _watts(gpus: Sequence[GpuUse]) -> str:
    watts = _sum([gpu.power_w for gpu in gpus])
    return "" if watts is None else formatting.number(watts, 3) + " W"


def _rate(bytes_per_s: float | None) -> str:
    return "" if bytes_per_s is None else formatting.quantity(bytes_per_s, "B/s")


def _size(mib: float) -> str:
    return formatting.size(mib * _MIB)


def _of(mib: float | None, total_mib: float | None) -> str:
    if mib is None:
        return ""
    return f"{_size(mib)} of {_size(total_mib)}" if total_mib else _size(mib)


def _value(figure: MetricValue | None) -> str:
    return "" if figure is None else formatting.metric(figure.value, figure.name)
