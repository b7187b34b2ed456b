"""Times in options of sbatch. Users mean their own time zone; sbatch reads the controller's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Final

from clusterctl.scheduler.request import Request
from clusterctl.spec.sbatch import Directive, quoted
from clusterctl.transport.base import Transport

# The formats of sbatch for a time of day, and for a date with a time or without one.
_CLOCKS: Final = ("%H:%M", "%H:%M:%S", "%I:%M%p", "%I:%M %p", "%I:%M:%S%p", "%I:%M:%S %p")
_DATES: Final = (
    "%Y-%m-%dT%H:%M:%S",
    "%Y-%m-%dT%H:%M",
    "%Y-%m-%d",
    "%m/%d/%y",
    "%m/%d/%Y",
    "%m%d%y",
)
_WORDS: Final = {"midnight": "00:00", "noon": "12:00", "fika": "15:00", "teatime": "16:00"}
_SLURM_FORMAT: Final = _DATES[0]


def with_local_times(
    transport: Transport | None, request: Request, now: datetime | None = None
) -> tuple[Request, tuple[str, ...]]:
    """Return the request with its points in time in the controller's time zone, and a note about each.

    transport: runs commands where sbatch runs. None: the time zone there is not known.
    now: the time in the user's time zone, without its name. Default: the current time.
    """
    now = now or datetime.now()
    given = request.slurm
    timed = {
        one.own_name: one
        for one in (*request.own, *given)
        if one.option is not None and one.option.clock
    }
    if not timed:
        return request, ()
    options = [quoted(str(one)) for one in given if one.own_name not in timed]
    notes: list[str] = []
    for directive in timed.values():
        moment = moment_of(directive.value or "", now)
        if moment is None or transport is None:
            notes += _notes_unchanged(directive, moment)
            if directive in given:
                options.append(quoted(str(directive)))
            continue
        asked = ("date", "-d", f"@{int(moment.timestamp())}", f"+{_SLURM_FORMAT}")
        there = transport.run(asked).stdout.strip()
        options.append(f"{directive.own_name}={there}")
        here = moment.strftime(f"{_SLURM_FORMAT} %Z")
        elsewhere = "" if here.startswith(there) else f", {there} on the cluster"
        notes.append(f"{directive} is {here} in your time zone{elsewhere}")
    job = request.job.model_copy(update={"slurm": tuple(options)})
    return request.of(job), tuple(notes)


def _notes_unchanged(request: Directive, moment: datetime | None) -> Iterator[str]:
    if moment is not None:
        yield f"{request} is in your time zone; a submission converts it to the cluster's"
    elif not (request.value or "").lower().startswith("now"):
        yield f"{request} is in the cluster's time zone; write YYYY-MM-DDTHH:MM for a time in yours"


def moment_of(text: str, now: datetime) -> datetime | None:
    """Return the time that a value of --begin or --deadline means in the user's time zone.

    None: the value is relative, such as now+1hour, or in another of Slurm's formats.
    """
    word = _WORDS.get(text.strip().lower(), text.strip())
    for form in (*_CLOCKS, *_DATES):
        # A year that Python does not know raises an OverflowError.
        with suppress(ValueError, OverflowError):
            moment = datetime.strptime(word, form)
            if form in _CLOCKS:
                # Slurm means the next such time.
                moment = datetime.combine(now.date(), moment.time())
                moment += timedelta(days=moment <= now)
            return moment.astimezone()
    return None
