#!/usr/bin/python3 -BESs
"""Sets nodes down in Slurm within seconds after they died, and lets requeued jobs start at once.

    watcher MISSES      a node is lost after so many checks without an answer; there is a check each second.
                        0: nodes are never set down

Runs on the controller as root. Slurm itself waits a minute for a lost node (SlurmdTimeout), then 30
s for the processes on the job's other nodes (KillWait), then until credentials expire. The watcher

- connects to a port of every node each second. No program listens there, so that the node's kernel
  refuses the connection (slurmd would log each check). A node without an answer is set down, so
  that Slurm requeues its jobs, if all of them ask for that (`--requeue` in their scripts): other
  jobs may survive a short interruption of the network.
- has the job's other nodes kill its processes (the role slurmd's program `fence`).
- has a node that answers again, or that Slurm has drained because of an old start of a job, kill
  the processes of its old jobs, and then resumes it. A node that it has set down twice in a day
  stays drained, with the times and jobs as reason.
- starts requeued jobs at once, after the nodes of their earlier start have killed remaining
  processes.
- lets jobs that wait for such nodes use nodes again that they have excluded after failures.
- requeues jobs that have ended, if slurmctld was killed and has forgotten their end.

If no other host answers, the fault is the controller's own network, so no node is set down, except
if the controller has a single other node. Runs with the platform's Python, from 3.9 on: it finds
slurm.py beside it, and writes no bytecode there.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import slurm
from slurm import Job, Node

PREFIX = "clusterctl watcher: "
# A node with so many losses in a day stays drained. Nodes that are lost within a minute have a
# common cause.
BAD = "clusterctl: lost repeatedly: "
LOSSES = 2
DAY_S = 86400
TOGETHER_S = 60
# If slurmctld was killed, it has forgotten the starts of its last seconds, and starts such a job
# again. A node that still runs the job rejects it, and Slurm drains the node for this reason.
DUPLICATE = "Duplicate jobid"
# It also forgets that jobs have ended. So long after its start, nodes have started all jobs from
# before.
BOOT = re.compile(r"^BOOT_TIME *= (\d+)", re.MULTILINE)
LAUNCHED_S = 10.0
# When a node registers, Slurm ends jobs that are missing there, but not within this time after its
# start, and some seconds (the time of a message).
BATCH_START = re.compile(r"^BatchStartTimeout *= (\d+)", re.MULTILINE)
MESSAGE_S = 20.0
EVERY_S = 1.0
# Time for the answer of a node that is lost already. Jobs are read more often shortly after a job
# ended.
LOST_S = 0.2
QUICK_S = 0.2
QUICKLY_S = 10.0
# Time until the next whole second of Slurm's clock has begun for certain.
SECOND_S = 1.02
# The list of nodes is read so often. A lost node that stays as it is, because of its jobs or
# processes, is looked at again after so many checks.
NODES_S = 10.0
AGAIN = 10
# squeue may use this part of the time, so that it is called less often if there are very many jobs.
SHARE = 0.25
# Programs on the other nodes of a job may save their work if its node was shut down, and not lost.
GRACE_S = 3.0
# Slurm delays a requeued job by at most two minutes (cred_expire). A later start is the user's
# wish.
LONGEST_DELAY_S = 130
# A check more for so many nodes, and for so many waiting processes of each processor of the
# controller.
NODES_PER_MISS = 64
LOAD_PER_MISS = 4
# A node in these states is not lost, or Slurm knows it already.
KNOWN = re.compile("DOWN|POWER|REBOOT|FUTURE|UNKNOWN")
RUNS_JOBS = re.compile("ALLOC|MIXED")
# Slurm's reason if too few of the nodes that a job may use are in service, and its words for no
# nodes.
UNAVAILABLE = "ReqNodeNotAvail, UnavailableNodes"
NO_NODES = ("", "(null)")
# Slurm's last reports come from a node up to so many seconds before its last answer.
KILLED_S = 5
RESTART = re.compile(r"\bRestarts=(\d+) .*?\bStartTime=(\d+)")


def log(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@dataclass
class Watcher:
    """The state between two checks.

    misses: node -> checks in a row without an answer. It lacks nodes that have never answered.
    silent: the nodes that did not answer the last check.
    tried: node -> check in which setting it down was last tried, or taking it back last failed.
    ran_on: job -> its nodes, in Slurm's form, until all of them have ended it, and a requeue starts
        it again.
    completing: job -> time at which Slurm was first seen to end it.
    fenced: job of ``completing`` -> time at which its processes were last killed.
    lifted: jobs that wait for nodes out of service, and exclude only the nodes of their user.
    settled: pending jobs that are not to start at once.
    stay: nodes that have answered again without old processes, but stay drained.
    losses: node -> (time, text) of each time at which it was set down while other nodes answered.
    boot: start of slurmctld, after which jobs were last compared with the nodes' processes. Unix
        seconds.
    """

    limit: int
    nodes: dict[str, Node] = field(default_factory=dict)
    nodes_due: float = 0.0
    jobs: list[Job] = field(default_factory=list)
    jobs_due: float = 0.0
    misses: dict[str, int] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    checks: int = 0
    checks_due: float = 0.0
    tried: dict[str, int] = field(default_factory=dict)
    ran_on: dict[str, str] = field(default_factory=dict)
    completing: dict[str, float] = field(default_factory=dict)
    fenced: dict[str, float] = field(default_factory=dict)
    lifted: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)
    stay: set[str] = field(default_factory=set)
    losses: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    boot: int = 0
    register_at: float = math.inf

    def run(self) -> None:
        while True:
            if time.monotonic() >= self.checks_due:
                self.checks_due = time.monotonic() + EVERY_S
                self.check_nodes()
            self.look_at_jobs()
            now = time.monotonic()
            has_new = any(now - since < QUICKLY_S for since in self.completing.values())
            time.sleep(QUICK_S if has_new else max(0.0, self.checks_due - now))

    def check_nodes(self) -> None:
        """Count the checks that each node has missed in a row. Set lost nodes down, and take nodes
        back.
        """
        if time.monotonic() >= self.nodes_due:
            self.nodes = slurm.read_nodes() or self.nodes
            self.nodes_due = time.monotonic() + NODES_S
            self.find_forgotten_ends()
            self.have_nodes_register()
        lost = [node for node in self.nodes.values() if is_lost(node)]
        others = [node for node in self.nodes.values() if not is_lost(node)]
        self.silent = slurm.silent_nodes(others, EVERY_S) | slurm.silent_nodes(lost, LOST_S)
        self.stay -= self.silent
        self.checks += 1
        for name in self.nodes:
            if name not in self.silent:
                if self.misses.get(name):
                    self.tried.pop(name, None)
                self.misses[name] = 0
            elif name in self.misses:
                self.misses[name] += 1

        # If no other host answers, the fault is the controller's. It always answers itself.
        remote = {name for name, node in self.nodes.items() if not slurm.is_own(node)}
        if self.silent != self.nodes.keys() and (len(remote) == 1 or not remote <= self.silent):
            self.set_down()
        self.take_back()

    def find_forgotten_ends(self) -> None:
        """After a start of slurmctld, requeue jobs that have ended, but are running according to
        Slurm.
        """
        config = slurm.ask("scontrol", "show", "config")
        match = BOOT.search(config)
        boot = int(match[1]) if match else self.boot
        if (
            boot == self.boot
            or time.time() - boot < LAUNCHED_S
            or (jobs := slurm.read_jobs()) is None
        ):
            return
        running = [job for job in jobs if job.state == "RUNNING" and job.start.isdigit()]
        before = {job for job in running if int(job.start) < boot}
        hosts = {job.host for job in before}
        nodes = [node for node in self.nodes.values() if node.name in hosts - self.silent]
        with ThreadPoolExecutor(max(1, min(32, len(nodes)))) as pool:
            scripts_on = dict(pool.map(slurm.request_list, nodes))
        if None not in scripts_on.values():
            self.boot = boot
        ended = {
            job
            for job in before
            if (ids := scripts_on.get(job.host)) is not None and job.id not in ids
        }
        # A job that has ended since the first list is not running in the second.
        for job in ended.intersection(slurm.read_jobs() or [] if ended else []):
            if slurm.asks_for_requeue(slurm.read_script(job)):
                slurm.ask("scontrol", "requeue", job.task)
                log(f"job {job.task}: requeued, because slurmctld has forgotten its end")
            else:
                timeout = BATCH_START.search(config)
                self.register_at = boot + (int(timeout[1]) if timeout else 0) + MESSAGE_S

    def have_nodes_register(self) -> None:
        """Have all nodes register, if Slurm shows jobs as running that have ended, so that it ends
        them. Otherwise they hold their nodes until nodes register by themselves, after minutes.
        """
        if time.time() >= self.register_at:
            self.register_at = math.inf
            slurm.ask("scontrol", "reconfigure")
            log("nodes register again, because slurmctld has forgotten ends of jobs")

    def look_at_jobs(self) -> None:
        if time.monotonic() >= self.jobs_due:
            self.read_jobs()
        self.fence_other_nodes()
        self.lift_exclusions()
        self.release()

    def read_jobs(self) -> bool:
        """Read all jobs. If squeue fails, keep the jobs, and return False."""
        begun = time.monotonic()
        jobs = slurm.read_jobs()
        now = time.monotonic()
        self.jobs_due = now + ((now - begun) / SHARE if now - begun > SHARE else 0.0)
        if jobs is None:
            return False
        self.jobs = jobs
        completing = [job.id for job in self.jobs if job.state == "COMPLETING"]
        self.completing = {id_: self.completing.get(id_, now) for id_ in completing}
        self.fenced = {id_: time_ for id_, time_ in self.fenced.items() if id_ in self.completing}
        pending = [job.id for job in self.jobs if job.state == "PENDING"]
        before = {id_: self.ran_on[id_] for id_ in completing + pending if id_ in self.ran_on}
        self.ran_on = {job.id: job.nodes for job in self.jobs if job.state == "RUNNING"} | before
        return True

    def limit_now(self) -> int:
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        return self.limit + len(self.nodes) // NODES_PER_MISS + int(load / LOAD_PER_MISS)

    def set_down(self) -> None:
        """Set lost nodes down if their jobs ask to be requeued, and kill the jobs on their other
        nodes.
        """
        limit = self.limit_now()
        for name in self.silent:
            if not self.limit or self.misses.get(name, 0) < limit or not self.is_due(name):
                continue
            if not self.read_jobs():
                continue
            self.tried[name] = self.checks
            killed = slurm.read_killed_jobs(name, self.misses[name] * EVERY_S + KILLED_S)
            ids = [job.id for job in killed]
            jobs = [
                job for job in self.jobs if name in slurm.expand(job.nodes) and job.id not in ids
            ]
            jobs += killed
            node = slurm.read_nodes(name).get(name)
            if not jobs or not node or KNOWN.search(node.state):
                continue
            if all(slurm.asks_for_requeue(slurm.read_script(job)) for job in jobs):
                self.set_node_down(node, jobs, killed)

    def set_node_down(self, node: Node, jobs: Collection[Job], killed: Collection[Job]) -> None:
        """Set a node down. jobs: all jobs on it. killed: those that Slurm does not requeue by
        itself.
        """
        name = node.name
        is_drained = "DRAIN" in node.state
        losses = self.losses_with(node.name, jobs)
        reason = f"{PREFIX}no answer for {self.misses[name]} s"
        if len(losses) >= LOSSES:
            reason = BAD + ", ".join(text for _, text in losses)
        reason = node.reason if is_drained else reason
        slurm.update(name, "down", reason)
        if not is_down(slurm.read_nodes(name).get(name)):
            return
        self.losses[name] = losses or self.losses.get(name, [])
        log(
            f"{name}: no answer for {self.misses[name]} s, set down; jobs "
            f"{' '.join(job.id for job in jobs)}"
        )
        # Jobs that end have time to save their work: see fence_other_nodes.
        self.fence_jobs([job for job in jobs if job.state != "COMPLETING" or job in killed])
        # Otherwise, Slurm would use the node as soon as it answers, with the processes of its old
        # jobs.
        if not is_drained:
            slurm.update(name, "drain", reason)
        # If an earlier start of a job has ended on this node, Slurm may believe that the job has
        # left it.
        remaining = self.jobs if self.read_jobs() else []
        kept = [
            job for job in remaining if job.state == "RUNNING" and name in slurm.expand(job.nodes)
        ]
        for job in [*killed, *kept]:
            slurm.ask("scontrol", "requeue", job.task)
        self.nodes_due = 0.0

    def losses_with(self, name: str, jobs: Iterable[Job]) -> list[tuple[float, str]]:
        """Return the node's losses in a day, with the present loss of these jobs.

        Empty if other nodes became silent at the same time: a switch may have failed.
        """
        now = time.time()
        if any(
            0 < count * EVERY_S < TOGETHER_S
            for other, count in self.misses.items()
            if other != name
        ):
            return []
        text = f"{time.strftime('%d %b %H:%M')} (jobs {', '.join(job.id for job in jobs)})"
        return [*(loss for loss in self.losses.get(name, []) if now - loss[0] < DAY_S), (now, text)]

    def is_due(self, name: str) -> bool:
        return self.checks - self.tried.get(name, -AGAIN) >= AGAIN

    def fence_jobs(self, jobs: Collection[Job]) -> None:
        names = {name for job in jobs for name in slurm.expand(job.nodes)} - self.silent
        if names:
            slurm.fence(
                [self.nodes[name] for name in names if name in self.nodes],
                *(job.id for job in jobs),
            )

    def fence_other_nodes(self) -> None:
        """Kill jobs that lost a node and are to be requeued, but keep running on other nodes."""
        for job in self.jobs:
            now = time.monotonic()
            since = max(self.completing.get(job.id, now), self.fenced.get(job.id, 0.0))
            if now - since < GRACE_S or job.id not in self.ran_on:
                continue
            nodes = slurm.read_nodes(self.ran_on[job.id]).values()
            self.fenced[job.id] = now
            if any(is_down(node) for node in nodes) and slurm.asks_for_requeue(
                slurm.read_script(job)
            ):
                # The job may have started again meanwhile.
                now_jobs = slurm.read_jobs() or []
                self.fence_jobs(
                    [new for new in now_jobs if (new.id, new.state) == (job.id, job.state)]
                )

    def take_back(self) -> None:
        """Resume nodes that were lost and answer again, once the processes of their old jobs are
        gone.
        """
        returning = []
        for name in self.nodes.keys() - self.silent:
            if name in self.stay or not is_lost(self.nodes[name]) or not self.is_due(name):
                continue
            self.nodes_due = 0.0
            node = slurm.read_nodes(name).get(name)
            if not node or not is_lost(node) or not slurm.runs_slurmd(node):
                continue
            if "DRAIN" not in node.state:
                slurm.update(name, "drain", f"{PREFIX}answers again")
            # Slurm may have used the node again before it was drained.
            drained = slurm.read_nodes(name).get(name)
            if drained and RUNS_JOBS.search(drained.state) and not node.reason.startswith(BAD):
                slurm.update(name, "resume")
            elif drained:
                returning.append(node)
        are_gone = slurm.fence(returning, slurm.ALL)
        for i, node in enumerate(returning):
            self.end_return(node, is_clean=are_gone[i])

    def end_return(self, node: Node, *, is_clean: bool) -> None:
        """Resume a node that is back, unless it must stay drained. is_clean: its old processes are
        gone.
        """
        must_stay = node.reason.startswith(BAD)
        if not is_clean:
            self.tried[node.name] = self.checks
            if not must_stay:
                slurm.update(node.name, "drain", f"{PREFIX}processes of its old jobs do not end")
        elif must_stay:
            self.stay.add(node.name)
        else:
            slurm.update(node.name, "resume")
            log(f"{node.name}: answers again, resumed; it was {node.state}: {node.reason}")

    def lift_exclusions(self) -> None:
        """Let jobs that wait for nodes out of service use nodes again that their job.py has
        excluded.
        """
        waiting = [
            job
            for job in self.jobs
            if job.state == "PENDING" and job.reason.startswith(UNAVAILABLE)
        ]
        # An id with a bracket is of the tasks of an array that have never started.
        stuck = {
            job.task: job for job in waiting if job.excluded not in NO_NODES and "[" not in job.task
        }
        self.lifted &= stuck.keys()
        for task in stuck.keys() - self.lifted:
            if not (script := slurm.read_script(stuck[task])):
                continue
            own = slurm.own_exclusions(script)
            if "job.py run" in script and {*slurm.expand(own)} != {
                *slurm.expand(stuck[task].excluded)
            }:
                slurm.ask("scontrol", "update", f"jobid={task}", f"excnodelist={own}")
            else:
                self.lifted.add(task)

    def release(self) -> None:
        """Start requeued jobs that wait only until credentials of their earlier start have
        expired.
        """
        waiting = {
            job.task: job
            for job in self.jobs
            if (job.state, job.reason) == ("PENDING", "BeginTime")
        }
        waiting = {task: job for task, job in waiting.items() if "[" not in task}
        self.settled &= waiting.keys()
        requeued = []
        ready = int(time.time()) + SECOND_S
        for task in waiting.keys() - self.settled:
            details = slurm.ask("scontrol", "--oneliner", "show", "job", task)
            if not (match := RESTART.search(details)):
                continue
            delay_s = int(match[2]) - time.time()
            if match[1] == "0" or delay_s > LONGEST_DELAY_S:
                self.settled.add(task)
                continue
            requeued.append(task)
            # Slurm does not know of processes that have lost their slurmstepd. A request that
            # arrives when the job runs again would kill the job.
            if delay_s > slurm.CREDENTIAL_S and (nodes := self.ran_on.pop(waiting[task].id, "")):
                self.fence_jobs([replace(waiting[task], nodes=nodes)])
        if requeued:
            # Nodes reject credentials from the second in which they were told to end the job.
            time.sleep(max(0.0, ready - time.time()))
        for task in requeued:
            slurm.ask("scontrol", "update", f"jobid={task}", "starttime=now")
            log(f"job {task}: requeued, starts now")


def is_lost(node: Node) -> bool:
    """Return whether a node is out of service because it did not answer, or because it ran an old
    job.
    """
    is_silent = "DOWN" in node.state and node.reason == "Not responding"
    return is_silent or bool(node.reason.startswith((PREFIX, BAD, DUPLICATE)))


def is_down(node: Node | None) -> bool:
    return node is not None and "DOWN" in node.state


if __name__ == "__main__":
    Watcher(int(sys.argv[1])).run()
