"""The command rehearse, which shows whether a job survives failures."""

from __future__ import annotations

from typing import Annotated

from clusterctl.cli.options import Words, argument, job_flags, option, takes
from clusterctl.cli.output import Screen
from clusterctl.cli.submit import Target, preparer
from clusterctl.cli.waiting import timeout_of
from clusterctl.rehearse.rehearsal import (
    LIMIT_S,
    MTBF_S,
    Rehearsal,
    Rehearser,
    job_to_rehearse,
)
from clusterctl.rehearse.verdict import CONTRACT, Fault
from clusterctl.scheduler.session import open_session
from clusterctl.spec.job_options import OPTIONS
from clusterctl.util import formatting

FaultNames = Annotated[
    list[Fault] | None, option("Cause only this fault. Repeatable.", tab=tuple(Fault))
]


@takes(job_flags(option for option in OPTIONS.values() if option.in_rehearse and option.in_submit))
def rehearse(
    screen: Screen,
    target: Target,
    args: Annotated[Words, argument("Arguments of the program, after --.")] = None,
    fault: FaultNames = None,
    mtbf: Annotated[
        str | None,
        option(
            "Mean time between failures of the job, for the interval of checkpoints. Default: 2d."
        ),
    ] = None,
    timeout: Annotated[
        str | None, option("Cancel the job without a fault after this time. Default: 10m.")
    ] = None,
    **given: object,
) -> None:
    """Cause faults in your job, and show whether it survives.

    On a local cluster, runs the job without a fault, then once for each fault, and compares the
    results. Exits with 7 if the job did not survive each fault.
    """
    options = {"args": args, **given} if args else given
    job = job_to_rehearse(target, options)
    limit_s = timeout_of(timeout) or LIMIT_S
    mtbf_s = timeout_of(mtbf, "--mtbf") or MTBF_S
    with open_session(screen.chosen()) as session, screen.working("rehearsing"):
        rehearser = Rehearser(session, screen.note, limit_s, mtbf_s)
        rehearsal = rehearser.rehearse(preparer(screen), job, fault or list(Fault))
    if not screen.json or rehearsal.survives:
        screen.result(rehearsal.as_dict(), *_lines(screen, rehearsal))
    rehearsal.raise_unless_survived()


def _lines(screen: Screen, rehearsal: Rehearsal) -> list[str]:
    head = ["FAULT", "VERDICT", "SECONDS", "AGAIN AFTER", "STEPS LOST", "LAST CHECKPOINT"]
    same = {True: "identical", False: "differs", None: "-"}
    lines = screen.table(
        head,
        [
            [
                trial.fault,
                trial.verdict,
                trial.seconds,
                _shown(trial.again_s),
                _shown(trial.steps_lost),
                same[trial.identical],
            ]
            for trial in rehearsal.trials
        ],
    )
    lines += [f"{trial.fault}: {trial.cause}" for trial in rehearsal.trials if trial.cause]
    faults_of: dict[str, list[str]] = {}
    for trial in rehearsal.trials:
        for line in trial.missing:
            faults_of.setdefault(line, []).append(trial.fault)
    for line, faults in faults_of.items():
        contract, advice = CONTRACT[line]
        lines += [
            "",
            f"missing ({', '.join(faults)}): the program should {contract}",
            f"  write: {advice}",
        ]
    return [*lines, *_interval_lines(rehearsal)]


def _interval_lines(rehearsal: Rehearsal) -> list[str]:
    observed = rehearsal.undisturbed.observed
    best_s = rehearsal.best_interval_s
    if observed.save_s is None or best_s is None:
        return []
    mtbf = formatting.duration(int(rehearsal.mtbf_s))
    return [
        "",
        (
            f"a checkpoint takes {observed.save_s:.2f} s: with a failure every {mtbf}, save "
            f"every {best_s:.0f} s"
        ),
    ]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
