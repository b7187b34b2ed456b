"""From the flags of `submit` to a JobSpec. All wrong flags come out in one UsageError that names each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from clusterctl.errors import Failure, UsageError
from clusterctl.spec.job import JOB_PATTERN_WORDS, JobSpec, JobWords
from clusterctl.spec.paths import HERE
from clusterctl.spec.target import named_job, safe_name
from clusterctl.spec.words import explain, shown


def job_spec(target: str, flags: Mapping[str, object]) -> JobSpec:
    """The job that a `submit` asks for. ``target`` is a bundled job's name, or the path of a script.

    ``flags`` holds what was given, by the names of JobWords' fields; ``model_fields_set`` of the job tells
    that from defaults.

    Raises:
        UsageError: the target is neither, or flags are wrong; ``failures`` has one entry a flag.
    """
    return job_of(target, job_words(flags).given, folder=Path())


def job_of(target: str, said: Mapping[str, Any], *, folder: Path) -> JobSpec:
    """The job of what was ``said`` and is valid; paths are relative to ``folder``.

    Raises:
        UsageError: the target is neither a bundled job nor a script.
    """
    bundled, script = named_job(target, folder)
    job = JobSpec(name=bundled or safe_name(target), bundled=bundled, script=script)
    given = {field: value for field, value in said.items() if field != "name" or value is not None}
    return job.model_copy(update=given)


def job_words(flags: Mapping[str, object]) -> JobWords:
    """What flags say of a job, or of an allocation.

    Raises:
        UsageError: flags are wrong; ``failures`` has one entry a flag.
    """
    try:
        return JobWords.model_validate(flags, context={HERE: Path.cwd()})
    except ValidationError as exc:
        raise _flags_error(_explained(exc, flags)) from exc


def _explained(error: ValidationError, flags: Mapping[str, object]) -> dict[str, str]:
    """Flag -> what is wrong with it, in plain words."""
    wrong: dict[str, str] = {}
    for entry in error.errors(include_url=False, include_input=False):
        field, kind = str(entry["loc"][0]), entry["type"]
        flag = "the arguments after --" if field == "args" else f"--{field.replace('_', '-')}"
        context: dict[str, Any] = dict(entry.get("ctx", {}))
        context["words"] = JOB_PATTERN_WORDS.get(context.get("pattern", ""), "")
        message = explain(kind, context, flag, shown(flags[field]))
        wrong.setdefault(flag, f"{flag}: {message}" if kind == "value_error" else message)
    return wrong


def _flags_error(wrong: Mapping[str, str]) -> UsageError:
    messages = tuple(wrong.values())
    failures = tuple(Failure(UsageError.code, message) for message in messages)
    if len(messages) == 1:
        return UsageError(messages[0], failures=failures)
    return UsageError(f"{len(messages)} flags are wrong", why="\n".join(messages), failures=failures)
