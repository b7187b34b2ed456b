"""The table of metric names: whether lower or higher values of a metric are better.

Everything that ranks or compares by a metric asks here. The direction of a name that is not known
here
is never guessed: the user states it as ``goal``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Final

from clusterctl.errors import BadValueError, UsageError


class Goal(StrEnum):
    """Whether the lowest or the highest values of the metric are the best."""

    MIN = "min"
    MAX = "max"

    @property
    def words(self) -> str:
        return f"{'lower' if self is Goal.MIN else 'higher'} is better"

    @property
    def opposite(self) -> Goal:
        return Goal.MAX if self is Goal.MIN else Goal.MIN


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Units of time, which measure how long something took.
_UNITS_OF_TIME: Final = _words(
    "s sec secs second seconds ms msec msecs millisecond milliseconds us usec usecs "
    "microsecond microseconds ns nsec nanosecond nanoseconds minute minutes hr hrs hour hours"
)
_TIMES: Final = _UNITS_OF_TIME | _words(
    "time times latency duration elapsed runtime walltime wallclock makespan delay stall "
    "stalls overhead idle jitter rtt ttft tpot itl"
)
_LOWER: Final = _TIMES | _words(
    "loss losses logloss xent crossentropy nll perplexity ppl bpb bpc error errors err mse "
    "rmse mae mape smape wape msle rmsle nrmse nmse rmsd mpjpe wer cer mer ter crps fid kid fvd "
    "lpips eer ece brier hausdorff chamfer regret residual residuals misfit aic bic fpr fnr "
    "miss misses fault faults failure failures mistake mistakes retry retries timeout timeouts "
    "violation violations mismatch mismatches imbalance carbon co2 emissions cost costs usd eur "
    "joule joules kj mj kwh wh"
)
_HIGHER: Final = _words(
    "acc accuracy f1 fscore fbeta auc auroc auprc aupr ap map miou iou dice jaccard mcc bleu "
    "sacrebleu rouge rougel rougelsum meteor chrf cider precision recall ndcg mrr hits tpr "
    "tnr reward rewards rew return returns score scores psnr ssim snr sdr r2 likelihood "
    "loglikelihood elbo hit success win wins correct throughput goodput bandwidth bw algbw "
    "busbw speed speedup efficiency fps qps rps tps iops mfu hfu ipc mips gups mups sypd"
)
# With a prefix such as G: operations, lattice updates, edges or bytes, per second.
_SPEED: Final = re.compile(r"[kmgtpez]?(?:flops|f?lups?|teps|iops|bps)|[kmgt](?:ib?|b)ps")
# What a program works through. So many of it in a second are its speed.
_WORK: Final = _words(
    "sample image img token tok sequence seq frame step iteration iter it update epoch batch "
    "example row record query request req event atom particle cell site point pt dof element "
    "op operation flop byte bit word char character pixel voxel ray message msg packet file "
    "document doc game episode edge pair interaction transaction timestep move read write "
    "photon hash key lookup job task call video clip utterance graph molecule residue b kb mb "
    "gb tb kib mib gib tib kbit mbit gbit tbit"
)
_PLURALS: Final = {"batches": "batch", "queries": "query", "hashes": "hash"}
# Parts of the work of a run that grow with the batch.
_STEPS: Final = _words("step iteration iter it epoch batch run job")
_PREFIX: Final = re.compile(r"[kmgt](?=..)")
_COSTS: Final = _words("joule joules j kj mj kwh wh watt watts w usd eur dollar dollars")
# Words beside the one that tells what is measured.
_BESIDE: Final = _words(
    "train training val valid validation eval evaluation test dev epoch step iter iteration "
    "batch total sum mean avg average median max maximum min minimum best last final first "
    "running ema value per at all cpu gpu node rank roc wall user sys macro micro weighted masked "
    "top percent pct k p kib mib gib"
)
# Words with the direction of the word before them: an error rate, the norm of a residual.
_SHARES: Final = _words("rate ratio fraction share score norm l1 l2 linf")
_NEGATIONS: Final = _words("neg negative minus inverse inv reciprocal")
# With one of these words, a name says something else than its last word alone: lost packets per
# second, the time between failures, a simulated time.
_ELSE: Final = _words(
    "no non not without false true lost dropped failed invalid skipped retried rejected "
    "wasted corrupt stalled bad wrong missed late expired evicted recomputed preempted "
    "padding pad redundant duplicate between survival coherence alive up sim simulated "
    "simulation physical remaining left"
)
# These words stand in front of a divisor, as in the price of 1k or a million tokens.
_AMOUNTS: Final = _words("k m million thousand")
# A metric, a sign and a number.
_TARGET: Final = re.compile(r"\s*(.+?)\s*(<=|>=|=)\s*(\S+)\s*")
_SIGNS: Final = {"<=": Goal.MIN, ">=": Goal.MAX}
# A number in front, as in 1-ssim, is no part of a name's first word.
_ONE_MINUS: Final = re.compile(r"(?:1|one)\s*(?:-|_minus_)\s*", re.IGNORECASE)
# The share of exact answers, or of those that pass within k attempts.
_PASSED: Final = re.compile(r"exact_match$|(?:^|[/_])pass@\d+$", re.IGNORECASE)
_PARENTHESES: Final = re.compile(r"\(.*?\)|\[.*?\]")
_CHUNK: Final = re.compile(r"[A-Za-z0-9]+")
_CAMEL: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SIMULATED: Final = _words("fs ps ns us ms s day days month months year years yr")
_HOURS: Final = _words("hour hours h hr day days")
_PLACES: Final = _words("gpu device node rank core cpu")
_DAYS: Final = _words("day days d")
# Bits per byte, character or dimension are a loss.
_BITS: Final = _words("bit bits")
_CODED: Final = _words("byte char character token word dim pixel")


def goal_given(text: object) -> Goal | None:
    """Return the value of --goal. Raises UsageError if it is not min or max."""
    if text is None:
        return None
    if text not in {*Goal}:
        raise UsageError(
            f"--goal: {text!r} is neither min nor max",
            code="not-a-goal",
            fix="use --goal min if lower values are better, or --goal max",
        )
    return Goal(str(text))


def goal_of(metric: str) -> Goal | None:
    """Return whether a metric's lowest or highest value is best, by its name; None if unknown.

    The last word that is not a mere addition decides: ``val/accuracy_loss`` is a loss. Amounts of
    work per time, energy or money are speeds.
    """
    if _PASSED.search(metric):
        return Goal.MAX
    if match := _ONE_MINUS.match(metric):
        goal = goal_of(metric[match.end() :])
        return None if goal is None else goal.opposite
    parts = _parts(metric)
    if (rate := _rate(parts)) is not None:
        return _of_rate(*rate)
    # A group stands in front, as in rollout/reward, or the metric does, as in Loss/train.
    return next((_of_words(words) for words in reversed(parts) if _telling(words)), None)


def is_time_of_all_work(metric: str) -> bool:
    """Return whether a metric that is better if lower grows with the work of the whole run or step.

    It is not if it is the time, energy or price of a sample or token.
    """
    rate = _rate(_parts(metric))
    return rate is None or not _is_work(rate[1][-1:]) or _singular(rate[1][-1]) in _STEPS


def is_loss(metric: str) -> bool:
    """Return whether a metric is a loss by its name, not the scale of a loss."""
    return "loss" in metric.lower() and "scale" not in metric.lower()


@dataclass(frozen=True, slots=True)
class Target:
    """A value that a metric should reach: at most or at least, by ``goal``."""

    metric: str
    goal: Goal
    value: float

    @classmethod
    def of(cls, text: str) -> Target:
        """Read a target such as ``eval_accuracy=0.97``, ``loss<=0.3`` or ``widgets>=2``.

        Raises BadValueError for other texts, and for ``=`` if the direction of the metric is not
        known.
        """
        match = _TARGET.fullmatch(text)
        try:
            value = float(match[3]) if match else math.nan
        except ValueError:
            value = math.nan
        if match is None or not math.isfinite(value):
            raise BadValueError(
                "not-a-target",
                f"{text!r} is not a metric with a number, such as eval_accuracy=0.97 or loss<=0.3",
            )
        metric = match[1]
        sign = match[2]
        goal = _SIGNS.get(sign) or goal_of(metric)
        if goal is None:
            raise BadValueError(
                "goal-unknown",
                f"it is not known whether lower or higher values of {metric!r} are better: write "
                f"{metric}<={match[3]} or {metric}>={match[3]}",
            )
        return cls(metric, goal, value)

    def __str__(self) -> str:
        return f"{self.metric} {'<=' if self.goal is Goal.MIN else '>='} {self.value:g}"

    def is_reached(self, value: float) -> bool:
        return value <= self.value if self.goal is Goal.MIN else value >= self.value


def _parts(metric: str) -> list[list[str]]:
    """Return the words of each part of a name between ``/``, without units in parentheses."""
    text = _PARENTHESES.sub("", metric).strip() or metric
    return [words for words in map(_split, text.split("/")) if words]


def _telling(words: list[str]) -> list[str]:
    """Return the words that tell what is measured."""
    return [word for word in words if word.rstrip("0123456789") not in ("", *_BESIDE)]


def _split(text: str) -> list[str]:
    """Return the words of a name in lower case: ["val", "acc"] of val_acc and valAcc."""
    words: list[str] = []
    for chunk in _CHUNK.findall(text):
        word = chunk.lower()
        is_one_case = chunk in (word, chunk.upper())
        is_whole = is_one_case or _direction(word) is not None or _is_work([word])
        words += [word] if is_whole else [part.lower() for part in _CAMEL.findall(chunk)]
    return words


def _rate(parts: list[list[str]]) -> tuple[list[str], list[str]] | None:
    """Return the words before and after ``per``, or ``/`` in its place, as in images/s."""
    for words in parts:
        if "per" in words[1:-1]:
            first = words.index("per", 1)
            below = words[first + 1 :]
            while len(below) > 1 and below[0].lstrip("0123456789") in ("", *_AMOUNTS):
                below = below[1:]
            return words[:first], below
    for above, below in pairwise(parts):
        if above[-1] in _HOURS and below[0] in _SIMULATED:
            return above, below
        is_by_unit = below[0] in _UNITS_OF_TIME | _DAYS | _COSTS and bool(_telling(above))
        if is_by_unit or (above[-1] in _UNITS_OF_TIME | _BITS and _is_work(below)):
            return above, below
    return None


def _of_rate(above: list[str], below: list[str]) -> Goal | None:
    """Return the goal of a metric such as images per second. below: also further divisors."""
    if len(below) > 2 and below[1] == "per" and below[0] in _PLACES:  # noqa: PLR2004 - of a GPU per second
        below = below[2:]
    unit = above[-1]
    divisor, *rest = below
    if rest and rest[0] != "per" and _telling(rest):
        # A deviation or a share of a speed is no speed.
        return None
    if divisor in _DAYS and unit in _SIMULATED:
        # Simulated time per day of the clock.
        return Goal.MAX
    if unit in _HOURS and divisor in _SIMULATED:
        # Time of the clock for a simulated time.
        return Goal.MIN
    if unit in _BITS and divisor not in _UNITS_OF_TIME:
        return Goal.MIN if _singular(divisor) in _CODED else None
    if _is_work([unit]) and _of_words(above) in (None, Goal.MAX):
        is_speed = divisor in _UNITS_OF_TIME | _DAYS | _COSTS
        return Goal.MAX if is_speed and not _ELSE & {*above} else None
    if unit in _UNITS_OF_TIME and divisor in _UNITS_OF_TIME | _DAYS:
        return None
    return _of_words(above)


def _of_words(words: list[str]) -> Goal | None:
    if _ELSE & {*words}:
        return None
    if "to" in words[1:]:
        # The time to an accuracy is a time.
        words = words[: words.index("to")]
    told = _telling(words)
    if not told:
        return None
    *before, last = told
    is_negated = bool(before) and before[0] in _NEGATIONS
    before = before[is_negated:]
    goal = _of_last(words, before, last)
    return goal.opposite if goal is not None and is_negated else goal


def _of_last(words: list[str], before: list[str], last: str) -> Goal | None:
    """Return the goal by the last word that tells what is measured.

    words: all words. before: the other words that tell what is measured.
    """
    if last in _SHARES:
        goal = _direction(before[-1]) if before else None
        is_speed = (
            last == "rate" and bool(before) and before[-1] != "sample" and _is_work(before[-1:])
        )
        return goal or (Goal.MAX if is_speed else _direction(last))
    if last in _UNITS_OF_TIME and words[-1] == last and before and _is_bytes(before[-1]):
        # Bytes per time, such as GB_s, are a speed.
        return Goal.MAX
    is_plural = bool(before) and before[-1].endswith("s") and _is_work(before[-1:])
    if last in _UNITS_OF_TIME and before and (is_plural or len(before[-1]) == 1):
        # images_s may be images per second, or the seconds of images; u_s any quantity.
        return None
    if last in ("time", "times") and words[-1] in ("step", "iter", "iteration", "epoch", "batch"):
        # time_step is the length of a step of a simulation, or its number.
        return None
    return _direction(last)


def _direction(word: str) -> Goal | None:
    plain = word if word in _LOWER | _HIGHER else word.rstrip("0123456789")
    if plain in _LOWER or plain.endswith("loss"):
        return Goal.MIN
    return Goal.MAX if plain in _HIGHER or (plain and _SPEED.fullmatch(plain)) else None


def _singular(word: str) -> str:
    return _PLURALS.get(word, word.removesuffix("s"))


def _is_bytes(word: str) -> bool:
    return re.fullmatch(r"[kmgtp]i?b|bytes", word) is not None


def _is_work(words: list[str]) -> bool:
    """Return whether the last word is an amount of work, such as samples, Mcells or GB."""
    if not words:
        return False
    word = words[-1]
    return any(_singular(each) in _WORK for each in (word, _PREFIX.sub("", word, count=1)))
