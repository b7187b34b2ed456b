"""The places for a job on all clusters of the user, for `where` and `submit --first best`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from clusterctl.cli.all_clusters import ALL, ClusterAnswers, all_clusters, ask_all
from clusterctl.cli.output import Screen
from clusterctl.errors import UsageError
from clusterctl.jobs.first import JobPlace, reject_unfit
from clusterctl.jobs.where import Candidate, candidates_of, ranked
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import SHOWN_PATIENCE_S, open_session

# The value of --first for the first N places of the ranking.
BEST: Final = re.compile(r"best:([2-9]|[1-9][0-9])")


@dataclass(frozen=True, slots=True)
class PlaceRanking:
    """The places for a job, the best first, and the answers of the clusters."""

    places: Sequence[Candidate]
    answers: ClusterAnswers[tuple[Candidate, ...]]


def rank(screen: Screen, request: Request, *, is_for_first: bool = False) -> PlaceRanking:
    """Ask the user's clusters for the places of a job, and note those that do not answer.

    is_for_first: leave out the clusters on which `submit --first` is not possible.
    """
    clusters = (
        all_clusters(screen)
        if screen.cluster in {None, ALL} and screen.file is None
        else {(chosen := screen.chosen()).workspace().root.name: chosen}
    )

    def ask(name: str) -> tuple[Candidate, ...]:
        with open_session(clusters[name], patience_s=SHOWN_PATIENCE_S) as session:
            if is_for_first:
                reject_unfit(session, request.job)
            return candidates_of(session, request)

    with screen.working("asking the clusters"):
        answers = ask_all([*clusters], ask)
    answers.note_errors(screen)
    places = ranked(each for found in answers.found.values() for each in found)
    return PlaceRanking(places, answers)


def best_places(screen: Screen, request: Request, count: int) -> tuple[JobPlace, ...]:
    """Return the first places of the ranking that accept the job, at most ``count``.

    Raises UsageError if there are fewer than two.
    """
    ranking = rank(screen, request, is_for_first=True)
    places = tuple(each.place for each in ranking.places if each.is_submittable)[:count]
    if len(places) < 2:  # noqa: PLR2004
        raise UsageError(
            f"--first best needs at least two places that accept the job, and got {len(places)}",
            about="first-places",
            fix="`clusterctl where JOB` shows all places, and why Slurm refuses the job there",
        )
    return places
