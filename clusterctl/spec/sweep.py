"""Sweeps: job arrays with other values for each task. Scalings: jobs on several numbers of
nodes.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, Final, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from clusterctl.errors import BadValueError
from clusterctl.spec.base import UNKNOWN, SpecModel, Toggle, folder_of
from clusterctl.spec.metrics import Goal, Target, goal_of
from clusterctl.spec.names import MAX_COUNT
from clusterctl.spec.table import read_table
from clusterctl.spec.units import shown

# `collect` makes a record of each. Slurm's limit of arrays is usually lower, and checked later.
MAX_TASKS: Final = 20_000
_OPTION: Final = re.compile(r"[A-Za-z][\w.-]{0,63}")
# Hydra also has names such as ++lr and db/type.
_KEY: Final = re.compile(r"\+{0,2}[A-Za-z][\w./@-]{0,63}")
_PAIR: Final = re.compile(r"[+~]{0,2}[A-Za-z][\w./@-]*=.*", re.DOTALL)
_RANGE: Final = re.compile(r"(log\s+)?(\S+?)\.\.(\S+)")
# A range of numbers, also in brackets and without one of its ends.
_BOUND: Final = r"[+-]?\.?\d\S*"
_NUMBERS: Final = re.compile(
    rf"(?:log\s+)?[\[({{]?(?:{_BOUND}?\.\.\.?{_BOUND}|{_BOUND}?\.\.\.?[\])}}]?)"
    rf"|(?:log\s+)?[\[({{]?\.\.\.?[+-]?\d\S*"
)
# In a list of numbers, it stands for values that are left out, as in 1,2,...,8.
_LEFT_OUT: Final = frozenset({"..", "...", "…"})
_MAX_REPEATS: Final = 100

# argparse takes these for negative numbers, and other words that begin with - for options.
_NEGATIVE: Final = re.compile(r"-(?:[0-9]+|[0-9]*\.[0-9]+)?")

# The values of a task, by key.
Values = Mapping[str, str]


class ArgumentForm(StrEnum):
    """How a task gets a value as arguments: ``--lr 0.1``, ``--lr=0.1``, or ``lr=0.1`` for Hydra."""

    OPTION = "--key value"
    JOINED = "--key=value"
    PAIR = "key=value"


def _key(name: str) -> str:
    if not _KEY.fullmatch(name):
        raise BadValueError(
            "not-an-option-name",
            f"{shown(name)} is not an option name: use a letter, then letters, digits, _ . or -",
        )
    return name


def _texts(value: object) -> object:
    """Turn a value, a list of values, or a range of whole numbers such as ``0..2`` into a tuple of
    texts.
    """
    values = value if isinstance(value, list | tuple) else [value]
    texts: list[str] = []
    for entry in values:
        if not isinstance(entry, str):
            advice = (
                ": write it in quotes, such as '[64,64]'" if isinstance(entry, list | dict) else ""
            )
            raise BadValueError(
                "sweep-value", f"{shown(entry)} is not a text, number or boolean{advice}"
            )
        texts += _whole_numbers(entry)
    left_out = next((text for text in texts if text in _LEFT_OUT), None)
    if left_out and any(re.fullmatch(_BOUND, text) for text in texts):
        raise _not_a_range(left_out)
    return tuple(texts)


def _whole_numbers(text: str) -> list[str]:
    """Return the numbers of a range such as ``0..2``. Any other text is a value."""
    match = _RANGE.fullmatch(text)
    with suppress(ValueError):
        if match and not match[1] and 0 <= int(match[3]) - int(match[2]) < MAX_TASKS:
            return [str(number) for number in range(int(match[2]), int(match[3]) + 1)]
    if _NUMBERS.fullmatch(text):
        raise _not_a_range(text)
    return [text]


def _not_a_range(text: str) -> BadValueError:
    return BadValueError(
        "sweep-range",
        f"{shown(text)} is not a range of up to {MAX_TASKS} whole numbers, such as 0..2; "
        "only `random` of a job file has other ranges",
    )


def _drawn_from(value: object) -> object:
    """Accept a list to choose from, or a range such as ``0.1..0.5``, ``1..8`` or ``log
    1e-5..1e-2``.
    """
    if isinstance(value, list | tuple) and value and all(isinstance(entry, str) for entry in value):
        return tuple(value)
    match = _RANGE.fullmatch(value) if isinstance(value, str) else None
    try:
        low, high = (Decimal(match[2]), Decimal(match[3])) if match else (Decimal(0), Decimal(0))
        if (
            match
            and low.is_finite()
            and high.is_finite()
            and low < high
            and (low > 0 or not match[1])
        ):
            return value
    except InvalidOperation:
        pass
    raise BadValueError(
        "sweep-values",
        f"{shown(value)} is neither a list nor a range such as 1..8, 0.1..0.5, log 1e-5..1e-2",
    )


def as_sweep(value: object) -> object:
    """Turn flags into a sweep: ``["lr=1e-4,3e-4"]`` into ``{"grid": {"lr": ["1e-4", "3e-4"]}}``.

    The flags may also be the grid of a sweep with more keys, such as ``metric``. A name such as
    params.csv is a table with combinations of values.
    """
    if isinstance(value, list | tuple):
        return _values_of(value)
    if isinstance(value, Mapping) and isinstance(flags := value.get("grid"), list | tuple):
        more = {key: entry for key, entry in value.items() if key != "grid"}
        return {**more, **_values_of(flags)}
    return value


def _values_of(flags: Sequence[object]) -> dict[str, object]:
    grid: dict[str, list[str]] = {}
    tables: list[str] = []
    for entry in map(str, flags):
        name, equals, texts = entry.partition("=")
        if not equals and entry.lower().endswith((".csv", ".tsv")):
            tables.append(entry)
        elif not equals or not texts:
            problem = (
                "does not have the form KEY=V,V or KEY=0..2, and is no table such as params.csv"
            )
            raise BadValueError("sweep-entry", f"{shown(entry)} {problem}")
        elif name in grid:
            raise BadValueError(
                "option-twice", f"{shown(name)} is given twice; join the values in one list"
            )
        else:
            grid[name] = _split_values(name, texts)
    if len(tables) > 1:
        raise BadValueError("tables-twice", f"{' and '.join(tables)}: join the tables in one file")
    return {**({"grid": grid} if grid else {}), **({"list": tables[0]} if tables else {})}


_BRACKETS: Final = {"[": "]", "(": ")", "{": "}"}


def _split_values(name: str, text: str) -> list[str]:
    """Split a text at its commas, but not at those in brackets or quotes, as in ``[64,64],[128]``.

    Raises BadValueError if the text has commas, and a bracket or a quote that is not closed.
    """
    values = []
    start = 0
    # What closes the brackets and the quote that are open.
    closing: list[str] = []
    for at, letter in enumerate(text):
        before = text[start:at][-1:]
        if closing and closing[-1] in "'\"":
            if letter == closing[-1] and before != "\\":
                closing.pop()
        elif letter in "'\"" and (not before or before in "[({,:= "):
            closing.append(letter)
        elif letter in _BRACKETS:
            closing.append(_BRACKETS[letter])
        elif letter in _BRACKETS.values():
            if [letter] != closing[-1:]:
                closing = [letter]
                break
            closing.pop()
        elif letter == "," and not closing:
            values.append(text[start:at])
            start = at + 1
    if closing and "," in text:
        raise BadValueError(
            "sweep-brackets",
            f"{shown(text)} has a bracket or quote without its counterpart, so that its commas "
            f"may be parts of values: write them in a job file, `sweep: {{grid: {{{name}: ['V', "
            "'V']}}`",
        )
    return [*values, text[start:]]


def _rows(value: object, info: ValidationInfo) -> object:
    """Read a table, if the value names a file."""
    if not isinstance(value, str):
        return value
    path = folder_of(info) / value
    rows = read_table(path)
    for name in dict.fromkeys(name for row in rows for name in row):
        try:
            _key(name)
        except BadValueError as exc:
            raise BadValueError(exc.code, f"{path}, line 1: {exc}") from exc
    return rows


_TEXT: Final = {"type": ["string", "number", "boolean"]}
Key = Annotated[str, AfterValidator(_key)]
_Fixed = Annotated[
    Mapping[Key, str], WithJsonSchema({"type": "object", "additionalProperties": _TEXT})
]
_Cases = Annotated[
    tuple[_Fixed, ...],
    BeforeValidator(_rows),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "object", "additionalProperties": _TEXT}},
            ]
        }
    ),
]
_Several = Annotated[
    tuple[str, ...],
    BeforeValidator(_texts),
    Field(min_length=1),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}),
]
_Random = Annotated[
    tuple[str, ...] | str,
    BeforeValidator(_drawn_from),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT, "minItems": 1}]}
    ),
]


class Sweep(SpecModel):
    """A sweep. Its tasks are all combinations of ``list``, ``grid`` and the ``trials`` of
    ``random``.
    """

    grid: Mapping[Key, _Several] = Field(
        {},
        description="every combination of these values; 0..2 is 0, 1, 2",
        examples=[{"lr": ["1e-4", "1e-3"]}],
    )
    cases: _Cases = Field(
        (),
        alias="list",
        description="these combinations of values, or the name of a table with them: a CSV file whose "
        "first line has the keys",
        examples=[[{"lr": "1e-4", "width": "64"}], "params.csv"],
    )
    random: Mapping[Key, _Random] = Field(
        {},
        description="values to draw for each trial: from a list, or from a range of whole numbers, a "
        "uniform range, or a range that is uniform in the logarithm",
        examples=[{"lr": "log 1e-5..1e-2", "layers": "1..8", "dropout": "0.0..0.5"}],
    )
    trials: Annotated[int, Field(ge=1, le=MAX_TASKS, strict=True)] | None = Field(
        None, description="number of random trials"
    )
    seed: Annotated[int, Field(ge=0, strict=True)] = Field(
        0, description="seed of the random numbers"
    )
    exclude: tuple[_Fixed, ...] = Field((), description="combinations to leave out")
    when: Mapping[Key, Mapping[Key, _Several]] = Field(
        {},
        description="pass a key only if other keys have these values",
        examples=[{"momentum": {"optimizer": "sgd"}}],
    )
    parallel: Annotated[int, Field(ge=1, le=MAX_TASKS, strict=True)] | None = Field(
        None, description="maximum number of tasks that run at the same time"
    )
    form: ArgumentForm | None = Field(
        None,
        description="how the program gets a value: `--key value`, `--key=value`, or `key=value` as for "
        "Hydra; default: `key=value` if all of the program's other arguments have this "
        "form, or a key begins with +; otherwise `--key value`, and `--key=value` for "
        "values such as -1e-3 and -x",
    )
    metric: str | None = Field(
        None, description="the metric that ranks the tasks", examples=["eval_loss"]
    )
    goal: Goal | None = Field(
        None,
        description="whether the metric's lowest or highest value is best; default: by its name, if the "
        "name tells",
    )

    @model_validator(mode="after")
    def _has_tasks(self) -> Self:
        # The mistake in a field has already been reported.
        if UNKNOWN in vars(self).values():
            return self
        _reject_unknown_goal(self.metric, self.goal)
        if bool(self.random) != (self.trials is not None):
            raise BadValueError("random-needs-trials", "random and trials must be given together")
        if not (self.grid or self.cases or self.random):
            raise BadValueError("sweep-empty", "a sweep needs a grid, a list, or random values")
        names = [*self.grid, *self.random, *{name for case in self.cases for name in case}]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise BadValueError(
                "option-twice", f"grid, list and random must not share keys: {shown(twice)}"
            )
        for name, values in self.grid.items():
            if value := next((value for value in values if values.count(value) > 1), None):
                message = f"{shown(value)} is twice among the values of {name}"
                raise BadValueError(
                    "value-twice", f"{message}; to repeat a task, also sweep a seed"
                )
        conditions = (*self.exclude, *self.when.values())
        for name in {*self.when, *(key for condition in conditions for key in condition)}:
            if name not in names:
                raise BadValueError(
                    "sweep-without-values", f"{shown(name)} in a condition has no values"
                )
        sizes = (max(len(self.cases), 1), self.trials or 1, *map(len, self.grid.values()))
        if any("\0" in value for values in self._texts for value in values):
            raise BadValueError(
                "null-byte", "a value contains a null byte, which no process can receive"
            )
        if math.prod(sizes) > 10 * MAX_TASKS or not 1 <= len(self.tasks) <= MAX_TASKS:
            raise BadValueError("sweep-too-large", f"a sweep must have 1 to {MAX_TASKS} tasks")
        return self

    @cached_property
    def tasks(self) -> tuple[Values, ...]:
        """For each task, in the order of the array's indices, option -> value. Equal tasks occur
        once.
        """
        tasks: dict[tuple[tuple[str, str], ...], None] = {}
        for values in self._combinations():
            if any(combination.items() <= values.items() for combination in self.exclude):
                continue
            task = tuple((key, value) for key, value in values.items() if self._holds(key, values))
            tasks[task] = None
        return tuple(map(dict, tasks))

    def _combinations(self) -> Iterator[dict[str, str]]:
        drawn = list(self._drawn())
        for case in self.cases or ({},):
            for values in itertools.product(*self.grid.values()):
                for trial in drawn:
                    yield {**case, **dict(zip(self.grid, values, strict=True)), **trial}

    def _drawn(self) -> Iterator[Values]:
        rng = random.Random(self.seed)  # noqa: S311 - not for secrets
        for _ in range(self.trials or 1):
            yield {key: _draw(rng, choice) for key, choice in self.random.items()}

    def _holds(self, key: str, values: Values) -> bool:
        return all(
            values.get(other) in allowed for other, allowed in self.when.get(key, {}).items()
        )

    def for_arguments(self, args: Sequence[str], *, reads_words: bool = False) -> Self:
        """Return the sweep with its form, which follows from the keys, the other arguments and the
        program.

        reads_words: whether the program reads only ``--key value``.
        """
        is_of_hydra = any(not _OPTION.fullmatch(key) for values in self.tasks for key in values)
        default = (
            ArgumentForm.PAIR
            if is_of_hydra or are_pairs(args)
            else ArgumentForm.OPTION
            if reads_words
            else None
        )
        return self.model_copy(update={"form": self.form or default})

    @property
    def record(self) -> dict[str, Any]:
        """The content of sweep-tasks.json: each task's values and arguments, and the ranking
        metric.
        """
        goal = self.goal or (goal_of(self.metric) if self.metric else None)
        ranking = {"metric": self.metric, "goal": goal}
        arguments = [sweep_arguments(values, self.form) for values in self.tasks]
        record = {"version": 1, **ranking, "keys": self.keys, "form": self.form}
        return {**record, "tasks": self.tasks, "arguments": arguments}

    @property
    def _texts(self) -> Iterator[Iterable[str]]:
        """The values that tasks may get."""
        yield from self.grid.values()
        yield from (case.values() for case in self.cases)
        yield from self.random.values()

    @property
    def keys(self) -> list[str]:
        """The names, as in a run's configuration, of the options that the sweep sets in at least
        one task.
        """
        names = (configured_name(key) for values in self.tasks for key in values)
        return list(dict.fromkeys(names))

    @property
    def array(self) -> str:
        """The value of ``sbatch --array``: ``0-7`` for 8 tasks, ``0-7%2`` if ``parallel`` is 2."""
        most = f"%{self.parallel}" if self.parallel else ""
        return f"0-{len(self.tasks) - 1}{most}"


def _draw(rng: random.Random, choice: tuple[str, ...] | str) -> str:
    if not isinstance(choice, str):
        return rng.choice(choice)
    match: Any = _RANGE.fullmatch(choice)
    low = Decimal(match[2])
    high = Decimal(match[3])
    if match[1]:
        return f"{math.exp(rng.uniform(math.log(low), math.log(high))):.6g}"
    if match[2].lstrip("+-").isdecimal() and match[3].lstrip("+-").isdecimal():
        return str(rng.randint(int(low), int(high)))
    return f"{rng.uniform(float(low), float(high)):.6g}"


def sweep_arguments(values: Mapping[str, str], form: object = None) -> list[str]:
    """Return a sweep task's values as arguments: ``--lr 0.1``, ``--flag`` for true, nothing for
    false.

    form: that of the sweep. With ``key=value`` and ``--key=value``, true and false are also values.
        ``--key value``: each value is an argument of its own. Default: as ``--key value``, but
        ``--lr=-1e-3`` for a value that a program could take for an option.
    """
    if form in {"key=value", "--key=value"}:
        dashes = "--" if form == "--key=value" else ""
        return [f"{dashes}{key}={value}" for key, value in values.items()]
    words = []
    for key, value in values.items():
        looks_like_option = value.startswith("-") and not _NEGATIVE.fullmatch(value)
        if value == "true":
            words.append(f"--{key}")
        elif looks_like_option and form is None:
            words.append(f"--{key}={value}")
        elif value != "false":
            words += [f"--{key}", value]
    return words


def configured_name(key: str) -> str:
    """Return the name of an option in a run's configuration: ``batch_size`` of ``+batch-size``."""
    return key.lstrip("+").replace("-", "_")


def are_pairs(args: Sequence[str]) -> bool:
    """Return whether a program has arguments, and all of them have the form ``lr=0.1``, as for
    Hydra.
    """
    return bool(args) and all(map(_PAIR.fullmatch, args))


def _reject_unknown_goal(metric: str | None, goal: Goal | None) -> None:
    """Raise BadValueError if neither a metric's name nor the user says which of its values are
    better.
    """
    if metric is not None and goal is None and goal_of(metric) is None:
        raise BadValueError(
            "goal-unknown",
            f"it is not known whether lower or higher values of {shown(metric)} are better: "
            "add --set sweep.goal=min or max, or scaling.goal; in a job file goal: min or goal: max",
        )


def _sizes(value: object) -> object:
    """Turn ``1,2,4`` or a list into different numbers in ascending order."""
    words = (
        value.split(",")
        if isinstance(value, str)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    texts = [str(word).strip() for word in words]
    are_numbers = all(text.isdecimal() and 0 < int(text) <= MAX_COUNT for text in texts)
    if not are_numbers or len({*map(int, texts)}) < 2:  # noqa: PLR2004 - numbers to compare
        raise BadValueError(
            "scaling-sizes", f"{shown(value)} is not a list of two or more numbers, such as 1,2,4"
        )
    return tuple(sorted({*map(int, texts)}))


def _target(text: str) -> str:
    """Check a target such as ``eval_accuracy=0.97``."""
    Target.of(text)
    return text


_Sizes = Annotated[tuple[int, ...], BeforeValidator(_sizes)]
# What a scaling varies: the field of a job with the number, by the field of the scaling.
SIZE_FIELDS: Final = {"nodes": "nodes", "tasks": "tasks_per_node", "gpus": "gpus"}


def as_scaling(value: object) -> object:
    """Turn a flag into a scaling: ``tasks=1,2,4`` into ``{"tasks": "1,2,4"}``, ``1,2,4`` into nodes.

    The flag may also be among the keys of a scaling, as ``sizes``.
    """
    if isinstance(value, Mapping) and "sizes" in value:
        more = {key: entry for key, entry in value.items() if key != "sizes"}
        return {**_sizes_of(value["sizes"]), **more}
    return _sizes_of(value) if isinstance(value, str | int) else value


def _sizes_of(flag: object) -> dict[str, str]:
    by, equals, sizes = str(flag).partition("=")
    return {by: sizes} if equals else {"nodes": by}


class Scaling(SpecModel):
    """Run a job on several numbers of nodes, or of tasks or GPUs per node, for a table of its
    scaling.
    """

    nodes: _Sizes | None = Field(
        None,
        description="numbers of nodes; the smallest is compared with the rest",
        examples=[[1, 2, 4]],
    )
    tasks: _Sizes | None = Field(
        None,
        description="in place of nodes: numbers of tasks (ranks) per node; in a bundled job each has a "
        "GPU, if the nodes have GPUs",
        examples=[[1, 2, 4, 8]],
    )
    gpus: _Sizes | None = Field(
        None,
        description="in place of nodes: numbers of GPUs per node, with a task (rank) for each unless "
        "the job sets tasks_per_node",
        examples=[[1, 2, 4, 8]],
    )
    weak: Toggle = Field(
        False,
        description="weak scaling: the work grows with the nodes, tasks or GPUs. For bundled jobs, "
        "--global-batch-size is the batch of one of them; your own program adapts its work "
        "itself. Default: strong scaling, with the same work on all",
    )
    repeats: Annotated[int, Field(ge=1, le=_MAX_REPEATS, strict=True)] = Field(
        1, description="number of jobs of each size"
    )
    metric: str | None = Field(
        None,
        description="the metric from which the speed-up is computed; default: samples_per_s, "
        "tokens_per_s, or the job's time",
        examples=["images_per_s"],
    )
    goal: Goal | None = Field(
        None,
        description="whether lower or higher values of the metric are faster; default: by its name, if "
        "the name tells",
    )
    time_to: Annotated[str, AfterValidator(_target)] | None = Field(
        None,
        description="a value of a metric; the table has the time until the program reached it",
        examples=["eval_accuracy=0.97", "loss<=0.3"],
    )

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        # The mistake in a field has already been reported.
        if UNKNOWN in vars(self).values():
            return self
        if [self.nodes, self.tasks, self.gpus].count(None) != len(SIZE_FIELDS) - 1:
            raise BadValueError(
                "scaling-of-one", "a scaling needs one of the keys nodes, tasks and gpus"
            )
        if self.goal is not None and self.metric is None:
            raise BadValueError("goal-without-metric", "goal needs a metric")
        _reject_unknown_goal(self.metric, self.goal)
        return self

    @property
    def by(self) -> str:
        """What the jobs differ in: nodes, tasks or gpus."""
        return next(name for name in SIZE_FIELDS if getattr(self, name) is not None)

    @property
    def field(self) -> str:
        """The field of a job that has the number of nodes, tasks or GPUs."""
        return SIZE_FIELDS[self.by]

    @property
    def sizes(self) -> tuple[int, ...]:
        sizes: tuple[int, ...] = getattr(self, self.by)
        return sizes
