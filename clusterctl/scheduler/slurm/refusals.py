"""The fix if Slurm rejects a job: the option at fault, and the command that lists its valid
values.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from clusterctl.errors import SlurmError
from clusterctl.scheduler.sites import advice
from clusterctl.scheduler.sites.advice import Advice

if TYPE_CHECKING:
    from clusterctl.spec.job_options import Refusal
    from clusterctl.spec.sbatch import Directive

_TOO_LARGE: Final = re.compile(
    "node configuration is not available|Node count|More processors|limit", re.IGNORECASE
)
# Reasons of limits of an account or a QOS, and Slurm's message that follows them. It also names
# time limits.
_OF_ACCOUNT: Final = re.compile(
    r"\b(Assoc|QOS)\w*(Limit|PerUser|PerAccount|PerJob)|accounting/QOS policy"
)
_JOBS_LIMIT: Final = re.compile(r"\b(Assoc|QOS)\w*SubmitJob")
_ACCOUNT: Final = re.compile("invalid account", re.IGNORECASE)
_LIST: Final = "sacctmgr show associations where user=$USER format=account,partition,qos"


@dataclass(frozen=True, slots=True)
class RequestedOptions:
    """The options of a request to Slurm.

    options: the options of sbatch or salloc, with their places.
    advice: remedies on the cluster itself.
    lists_accounts: whether Slurm's accounting tells the user's accounts.
    """

    options: Sequence[Directive] = ()
    advice: Advice = advice.OWN
    lists_accounts: bool = True

    def fix(self, refusal: str) -> str:
        """Return the fix for a refusal message. It names the option at fault and the place of the
        option. "": the message says nothing that is known.
        """
        if re.search("time limit|deadline", refusal, re.IGNORECASE) and (
            late := [one for one in self.options if one.own_name == "--deadline"]
        ):
            return (
                f"leave out {_places(late)}, or use a time that leaves the job's --time until then"
            )
        return (
            self._fix_of_account(refusal)
            or self._fix_of_option(refusal)
            or self._general_fix(refusal)
        )

    def at_fault(self, refusal: str) -> list[Directive]:
        """Return the options that a refusal message is about. Empty: it does not tell."""
        if _ACCOUNT.search(refusal):
            return self._with({"--account"})
        patterns = ((rule.pattern, quantities) for _, quantities, rule in _rules())
        return next(
            (
                asked
                for pattern, quantities in patterns
                if re.search(pattern, refusal, re.IGNORECASE) and (asked := self._with(quantities))
            ),
            [],
        )

    def _fix_of_option(self, refusal: str) -> str:
        """Return the fix if the refusal names an option, otherwise ""."""
        for flag, quantities, rule in _rules():
            if not re.search(rule.pattern, refusal, re.IGNORECASE):
                continue
            asked = self._with(quantities)
            if flag == "--time" and not any(one.own_name == flag for one in asked):
                limits = f"`clusterctl ssh '{rule.lists}'` shows the limits"
                return f"pass the time that the job needs with --time; {limits}"
            subject = _places(asked) or flag
            if rule.is_conflict:
                return f"leave out {subject}" + (f", or {flag}" if subject != flag else "")
            if not rule.lists:
                return f"correct {subject}"
            return f"leave out {subject}, or use a value from `clusterctl ssh '{rule.lists}'`"
        return ""

    def _with(self, quantities: Collection[str]) -> list[Directive]:
        """Return the options that set one of these quantities."""
        return [one for one in self.options if not one.quantities.isdisjoint(quantities)]

    def _general_fix(self, refusal: str) -> str:
        if SlurmError.broken.search(refusal):
            return self.advice.repair
        if not _TOO_LARGE.search(refusal):
            return ""
        return f"ask for less; {self.advice.shows_nodes}"

    def _fix_of_account(self, refusal: str) -> str:
        """Return the fix if the account or the QOS is the cause, otherwise ""."""
        more = f"; `clusterctl ssh '{_LIST}'` lists yours" if self.lists_accounts else ""
        if self.advice.sets_account:
            more += f"; {self.advice.sets_account}"
        if _ACCOUNT.search(refusal):
            given = _places(self._with({"--account"}))
            if not given:
                return f"name your Slurm account with --account{more}"
            leave = f"leave out {given}, or " if self.advice.is_operator else ""
            return f"{leave}use another account, or another --partition or --qos{more}"
        if not _OF_ACCOUNT.search(refusal):
            return ""
        if _JOBS_LIMIT.search(refusal):
            fewer = "submit fewer tasks, or all in a single job with --pack, or "
            fewer = fewer if self._with({"--array"}) else ""
            return (
                f"{fewer}use another --account or --qos, or submit again when fewer of your jobs "
                f"wait or run{more}"
            )
        return f"ask for less, or use another --account or --qos{more}"


def _rules() -> list[tuple[str, frozenset[str], Refusal]]:
    """Return the flag, the quantities, and how Slurm rejects their values; vague messages last."""
    # A slow import, which only a rejected job needs.
    from clusterctl.spec.job_options import OPTIONS, Refusal  # noqa: PLC0415

    rules = [
        (option.flag, frozenset({option.sbatch, *option.refusal.also}), option.refusal)
        for option in OPTIONS.values()
        if option.refusal is not None
    ]
    # Options of sbatch without flags of their own.
    of_nodes = Refusal("node name|node list", "sinfo --format=%n")
    rules.append(("--nodelist", frozenset({"--nodelist", "--exclude"}), of_nodes))
    return sorted(rules, key=lambda rule: rule[2].is_vague)


def _places(options: Sequence[Directive]) -> str:
    """Return the places of options, for a message."""
    return " and ".join(dict.fromkeys(one.place for one in options))
