"""Doubles of Slurm's commands; see cluster.py. Called as: player.py COMMAND ARGUMENTS.

Tests start it thousands of times, so it imports no slow modules, such as pathlib and subprocess.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import sys
import time
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


@contextmanager
def opened(path: str) -> Iterator[dict[str, Any]]:
    """The state, to look at and to change; a command that is killed meanwhile leaves it whole."""
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with open(path) as file:
            state = json.load(file)
        yield state
        with open(f"{path}.new", "w") as file:
            json.dump(state, file)
        os.replace(f"{path}.new", path)


def say(text: str) -> None:
    sys.stdout.write(text)


def fail(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.exit(1)


def option(argv: list[str], name: str) -> str | None:
    return next((word.split("=", 1)[1] for word in argv if word.startswith(f"--{name}=")), None)


def say_record(argv: list[str], values: list[str] | dict[str, str]) -> None:
    """Each value followed by the separator that the command asked for.

    values: all fields in the order in which clusterctl asks for them, or the asked fields by name.
    """
    asked = str(option(argv, "format") or option(argv, "Format")).split(",")
    names = [field.partition(":")[0] for field in asked]
    separator = option(argv, "delimiter") or asked[0].partition(":")[2]
    if isinstance(values, dict):
        values = [values.get(name, "") for name in names]
    say("".join(value + separator for value in values) + "\n")


def refuse_options(asked: dict[str, str], state: dict[str, Any]) -> None:
    """Refuse a script with an option of state["refuse_options"] (its name -> the message)."""
    for name, message in state.get("refuse_options", {}).items():
        if name in asked:
            fail(message)


def test_only(state: dict[str, Any]) -> None:
    """Print what `sbatch --test-only` prints about a script on stdin.

    state["trials"]: partition, or partition@account -> the messages of a refusal, or a start in Unix
    seconds.
    """
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", sys.stdin.read(), re.MULTILINE))
    partition = asked.get("partition", "train")
    state.setdefault("tried", []).append(asked)
    known = {fields["Partition"] for fields in state.get("nodes", [])}
    if known and partition not in known:
        fail(f"sbatch: error: invalid partition specified: {partition}\n"
             "allocation failure: Invalid partition name specified")  # fmt: skip
    refuse_options(asked, state)
    trials = state.get("trials", {})
    answer = trials.get(f"{partition}@{asked.get('account')}", trials.get(partition, time.time()))
    if isinstance(answer, str):
        fail(answer)
    start = int(answer)
    if os.environ.get("SLURM_TIME_FORMAT") != "%s":
        raise AssertionError("the time is in the site's format and time zone")
    sys.stderr.write(
        f"sbatch: Job {state['next']} to start at {start} using 1 processors on nodes n1 in "
        f"partition {partition}\n"
    )


def sbatch(argv: list[str], state: dict[str, Any]) -> None:
    if "--test-only" in argv:
        test_only(state)
        return
    if refusal := state.get("refuse"):
        fail(refusal)
    script = os.path.abspath(argv[argv.index("--") + 1])
    with open(script, errors="replace") as file:
        asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", file.read(), re.MULTILINE))
    refuse_options(asked, state)
    job_id = str(state["next"])
    state["next"] += 1
    job = {
        "name": asked.get("job-name", os.path.basename(script)),
        "state": "PENDING",
        "reason": "",
        "code": 0,
        "signal": 0,
        "comment": option(argv, "comment") or "",
        "dir": os.getcwd(),
        "submit": int(time.time()),
        "forgotten": False,
        "argv": argv,
    }
    state["jobs"][job_id] = job
    if not state.get("hold") and "--hold" not in argv:
        job |= {"state": "RUNNING", "start": int(time.time())}
        logs = [os.path.abspath(asked[name]) for name in ("output", "error")]
        step = [sys.executable, "-I", "-S", __file__, "run", job_id, script, *logs]
        nothing = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
        job["pid"] = os.posix_spawn(step[0], step, os.environ, file_actions=nothing, setsid=True)
    if state.get("lose_answer"):
        state["lose_answer"] = False
        fail("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
    say(f"{job_id}\n")


def run(job_id: str, script: str, output: str, error: str) -> None:
    """The batch step: run the script and write down how it ended."""
    os.closerange(3, 1024)  # of those who called sbatch
    environment = {**os.environ, "SLURM_SUBMIT_DIR": os.getcwd(), "SLURM_JOB_ID": job_id}
    environment |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "1", "SLURM_JOB_NODELIST": "n1"}
    environment |= {"SLURMD_NODENAME": "n1"}
    with open(script, errors="surrogateescape") as file:
        text = file.read()
    payload = os.path.join(os.path.dirname(os.environ["SLURM_PLAYER_STATE"]), "payload")
    text = text.replace("$HOME/clusterctl/store/archives", payload)
    text = text.replace("/opt/clusterctl/env/bin/python", sys.executable)
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    logs = [
        (os.POSIX_SPAWN_OPEN, number, path, append, 0o666)
        for number, path in ((1, output), (2, error))
    ]
    defaults = (signal.SIGPIPE, signal.SIGXFSZ)  # which Python ignores
    argv = ["bash", "-c", text]
    shell = os.posix_spawnp(argv[0], argv, environment, file_actions=logs, setsigdef=defaults)
    rc = os.waitstatus_to_exitcode(os.waitpid(shell, 0)[1])
    with opened(os.environ["SLURM_PLAYER_STATE"]) as state:
        job = state["jobs"][job_id]
        job["end"] = int(time.time())
        if job["state"] == "RUNNING":
            job |= {
                "state": "COMPLETED" if rc == 0 else "FAILED",
                "code": max(rc, 0),
                "signal": max(-rc, 0),
            }
            job["reason"] = "NonZeroExitCode" if rc > 0 else ""


def rows(state: dict[str, Any], argv: list[str]) -> list[tuple[str, dict[str, Any]]]:
    asked = option(argv, "jobs")
    ids = asked.split(",") if asked else list(state["jobs"])
    return [(i, state["jobs"][i]) for i in ids if i in state["jobs"]]


def common(job: dict[str, Any]) -> dict[str, str]:
    """Return the fields that squeue and sacct name alike. A test may set any field by its name."""
    named = {key: value for key, value in job.items() if key[0].isupper()}
    return {
        "Partition": "train",
        "Account": "default",
        "QOS": "normal",
        "State": job["state"],
        "WorkDir": job["dir"],
        **named,
    }


def squeue(argv: list[str], state: dict[str, Any]) -> None:
    found = [(i, job) for i, job in rows(state, argv) if not job["forgotten"]]
    if not found and option(argv, "jobs"):
        fail("slurm_load_jobs error: Invalid job id specified")
    for job_id, job in found:
        used_s = max(0, job.get("end", 0) - job.get("start", 0)) if "start" in job else 0
        values = {
            "JobID": job_id,
            "ArrayJobID": job_id,
            "Name": job["name"],
            "UserName": job.get("user", "hpc"),
            "Reason": job["reason"] or "None",
            "exit_code": str(job["code"] << 8 | job["signal"]),
            "NodeList": "n1" if "start" in job else "",
            "SubmitTime": str(job.get("submit", "N/A")),
            "StartTime": str(job.get("start", "N/A")),
            "EndTime": str(job.get("end", "N/A")),
            "TimeLimit": "1-00:00:00",
            "tres-alloc": "cpu=1,mem=1G,node=1",
            "Comment": job["comment"] or "(null)",
            "RestartCnt": str(job.get("restarts", 0)),
            "TimeUsed": f"{used_s // 3600}:{used_s % 3600 // 60:02}:{used_s % 60:02}",
        }
        for task in job.get("tasks", ["N/A"]):
            say_record(argv, {**values, "ArrayTaskID": str(task), **common(job)})


def scontrol(argv: list[str], state: dict[str, Any]) -> None:
    """Answer questions about partitions; a ping with nothing."""
    if argv[:2] == ["show", "partition"]:
        for fields in state.get("partitions", []) if state.get("hides_nodes") else []:
            up = fields["Available"].upper()
            say(f"PartitionName={fields['Partition']} MaxTime=UNLIMITED State={up} TotalNodes=2\n")


def sacct(argv: list[str], state: dict[str, Any]) -> None:
    if state.get("accounting_away"):
        fail("sacct: error: Sending PersistInit msg: Connection refused")
    if refusal := state.get("accounting_refuses"):
        fail(refusal)
    if "--json" in argv:
        if odd := next((job["odd"] for _, job in rows(state, argv) if "odd" in job), None):
            fail(odd)
        jobs = [
            {"job_id": int(i), "state": {"current": job["state"]}} for i, job in rows(state, argv)
        ]
        say(json.dumps({"jobs": jobs, "errors": []}))
        return
    found = rows(state, argv)
    if "--allusers" not in argv and not option(argv, "jobs"):
        # Without the options, sacct shows the jobs of the user that runs it (sacct(1)).
        found = [(i, job) for i, job in found if job.get("user", "hpc") == "hpc"]
    if since := option(argv, "starttime"):
        first = int(since.removeprefix("uts")) if since.startswith("uts") else 0
        found = [(i, job) for i, job in found if int(job.get("end", first)) >= first]
    if "--duplicates" in argv:
        # A requeued job has a record for each attempt; without the option, sacct shows the last
        # (sacct(1)).
        found = [(i, attempt) for i, job in found for attempt in (*job.get("attempts", ()), job)]
    for job_id, job in found:
        values = {
            "JobIDRaw": job_id,
            "JobName": job["name"],
            "User": job.get("user", "hpc"),
            "Reason": "None",
            # As src/sacct/print.c of Slurm.
            "ExitCode": f"{job['code'] % 128}:{job['signal']}",
            "NodeList": job.get("nodes", "n1" if "start" in job else "None assigned"),
            "Submit": str(job.get("submit", "Unknown")),
            "Start": str(job.get("start", "Unknown")),
            "End": str(job.get("end", "Unknown")),
            "Timelimit": "UNLIMITED",
            "AllocTRES": "",
            "ReqTRES": "cpu=1,mem=1G,node=1",
            "Comment": job["comment"],
        }
        for own_id in [f"{job_id}_{task}" for task in job.get("tasks", ())] or [job_id]:
            say_record(argv, {**values, "JobID": own_id, **common(job)})


def scancel(argv: list[str], state: dict[str, Any]) -> None:
    refused = [job_id for job_id in argv if state["jobs"].get(job_id, {}).get("owner")]
    for job_id in argv:
        job = state["jobs"].get(job_id)
        if job and job_id not in refused and job["state"] not in ENDED:
            job |= {"state": "CANCELLED", "end": int(time.time())}
            if job.get("pid"):
                # The job may have called scancel itself. Slurm kills it after scancel's request.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.killpg(job["pid"], signal.SIGTERM)
    if refused:
        lines = (
            f"scancel: error: Kill job error on job id {i}: Access/permission denied"
            for i in refused
        )
        fail("\n".join(lines))


def sinfo(argv: list[str], state: dict[str, Any]) -> None:
    if "--version" in argv:
        say("slurm-wlm 22.05.8\n")
    elif state.get("hides_nodes"):
        fail("slurm_load_node error: Access/permission denied")
    elif "--Node" not in argv and "partitions" in state:
        for fields in state["partitions"]:
            say_record(argv, fields)
    elif "--format=%R" in argv:
        say("train\nclusterctl-proof\n")
    else:
        states = option(argv, "states")
        for fields in state.get("nodes", []):
            # "drain" means draining and drained nodes (sinfo(1)).
            if states is None or fields["StateLong"].startswith(tuple(states.split(","))):
                say_record(argv, fields)


def sacctmgr(argv: list[str], state: dict[str, Any]) -> None:
    if state.get("accounting_away"):
        fail("sacctmgr: error: Sending PersistInit msg: Connection refused")
    say("default\n" if "associations" in argv else "normal\nhigh\n")


PLAYED = {
    play.__name__: play for play in (sbatch, squeue, sacct, scancel, scontrol, sinfo, sacctmgr)
}


def main(command: str, *words: str) -> None:
    argv = [*words]
    if command == "run":
        run(*argv)
        return
    if command == "srun" and "--job-name=telemetry" not in argv:
        program = next(i for i, word in enumerate(argv) if not word.startswith("-"))
        os.execvp(argv[program], argv[program:])  # noqa: S606
    if command == "srun":
        return
    if command == "scontrol" and argv[1:2] not in ([], ["config"], ["partition"]):
        say("n1\nn2\n")
        return
    with opened(os.environ["SLURM_PLAYER_STATE"]) as state:
        calls = state.setdefault("calls", {})
        calls[command] = calls.get(command, 0) + 1
        is_away = state.get("away", 0) > 0
        if command == "scontrol" and "away_words" in state:  # it takes connections
            is_away = False
        state["away"] = state.get("away", 0) - is_away
        if argv == ["ping"]:
            say(f"Slurmctld(primary) at ctl is {'DOWN' if is_away else 'UP'}\n")
            rc = int(is_away)
        elif is_away:
            words = state.get("away_words", "Unable to contact slurm controller (connect failure)")
            sys.stderr.write(f"{command}: error: {words}\n")
            rc = 1
        else:
            rc = 0
            try:
                PLAYED[command](argv, state)
            except SystemExit as exc:
                rc = int(exc.code or 0)
    sys.exit(rc)


if __name__ == "__main__":
    main(*sys.argv[1:])
