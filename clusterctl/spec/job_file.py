"""Job files: one job, or several variants of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from clusterctl.errors import Problem, SpecError, UsageError
from clusterctl.spec.base import HERE, PATTERNS, SCHEMA_DIALECT, Fault, Loc, dotted
from clusterctl.spec.job import JobSpec, job_of
from clusterctl.spec.job_options import Argument, FilePattern, JobOptions, job_options
from clusterctl.spec.names import did_you_mean
from clusterctl.spec.parse import Document, Filetype, read_text
from clusterctl.spec.units import shown

_MAX_NAME = 64
VariantName = Annotated[str, PATTERNS["variant"]]


class _Program(JobOptions):
    """What may be said of a job, and its program."""

    job: str | None = Field(
        None, description="a bundled job, or the path of a script", examples=["train", "./train.py"]
    )


class Variant(_Program):
    """What a variant overrides in the file. Its variables are added to the file's.

    A list is appended to the file's under its name with a +; without that, the file has no such list.
    """

    more_args: tuple[Argument, ...] = Field((), alias="args+", description="more arguments of the program")
    more_include: tuple[FilePattern, ...] = Field((), alias="include+", description="more of include")
    more_exclude: tuple[FilePattern, ...] = Field((), alias="exclude+", description="more of exclude")
    more_outputs: tuple[FilePattern, ...] = Field((), alias="outputs+", description="more of outputs")


_LISTS: Final = ("args", "include", "exclude", "outputs")


class JobFile(_Program):
    """One job, or several that differ in what their variants say. Paths are relative to the file."""

    variants: Mapping[VariantName, Variant] = Field(
        {}, description="variants by name, with what each overrides; all are submitted"
    )


def _faults(file: JobFile) -> Iterator[Fault]:
    hint = "write job: train, or the path of a script"
    if "job" not in file.model_fields_set and not file.variants:
        yield Fault("job-missing", ("job",), "job is missing", hint)
    for name, variant in file.variants.items():
        if not {"job"} & (file.model_fields_set | variant.model_fields_set):
            yield Fault(
                "job-missing", ("variants", name), "job is missing, here and in the file", hint, at_key=True
            )
        yield from _lost_lists(file, name, variant)


def _lost_lists(file: JobFile, name: str, variant: Variant) -> Iterator[Fault]:
    """Lists that would take the place of others unseen."""
    for key in _LISTS:
        if key not in variant.model_fields_set:
            continue
        where, append = ("variants", name, key), f"write {key}+ to append to the file's"
        if f"more_{key}" in variant.model_fields_set:
            message = f"{key} and {key}+ stand in one variant"
            yield Fault("list-twice", where, message, f"make one list of both; {append}")
        elif getattr(file, key):
            hint = f"{append}, or move the file's {key} into its variants"
            message = f"{key} would replace the file's own {key}"
            yield Fault("list-would-replace", where, message, hint, at_key=True)


JOB_FILE: Final = Filetype(
    name="job file",
    model=JobFile,
    faults=_faults,
    missing="name a file that exists",
    empty="write job: train, or the path of a script",
    as_text=frozenset({"args", "args+", "env", *"grid list random exclude when".split()}),
)


def jobs_of_file(
    path: Path, flags: Mapping[str, object], variants: Sequence[str] = ()
) -> tuple[JobSpec, ...]:
    """The jobs of a job file: its one job, or all its variants, or those named. Flags win over the file.

    Raises:
        UsageError: the file can't be read, has no such variant, or flags are wrong.
        SpecError: the file is wrong.
    """
    document = Document(read_text(path, JOB_FILE), str(path), JOB_FILE)
    if "partitions" in document.keys(()) and "job" not in document.keys(()):
        raise UsageError(
            f"{path} describes a cluster, not a job",
            code="spec-not-a-job-file",
            fix=f"`clusterctl -f {path} up` raises it; what to submit is named by the key job of a job file",
        )
    return _jobs(path, document, job_options(flags), variants)


def _jobs(
    path: Path, document: Document[JobFile], flags: JobOptions, chosen: Sequence[str]
) -> tuple[JobSpec, ...]:
    file = document.model({HERE: path.parent})
    for name in chosen:
        if name not in file.variants:
            known = ", ".join(file.variants) or "none"
            near = did_you_mean(name, file.variants)
            raise UsageError(
                f"{path} has no variant {shown(name)}",
                code="unknown-variant",
                fix=near or f"its variants: {known}",
            )
    names = dict.fromkeys(chosen or file.variants)
    if not names:
        return (_named(path, document, ("job",), file.job, _layered(file, flags)),)
    jobs = []
    for name in names:
        variant = file.variants[name]
        said = _layered(file, variant, flags)
        where = ("variants", name, "job") if variant.job else ("job",)
        job = _named(path, document, where, variant.job or file.job, said)
        if variant.name is None or (flags.name is not None and len(names) > 1):
            job = job.model_copy(update={"name": f"{job.name[: _MAX_NAME - len(name) - 1]}-{name}"})
        jobs.append(job)
    return tuple(jobs)


def _layered(*layers: JobOptions) -> dict[str, Any]:
    """What several say together, the last wins; variables and tags are added up, and lists named with a +."""
    said: dict[str, Any] = {}
    for layer in layers:
        env = {**said.get("env", {}), **layer.env}
        tags = tuple(dict.fromkeys((*said.get("tag", ()), *layer.tag)))
        more = {key: layer.given.get(f"more_{key}", ()) for key in _LISTS}
        added = {key: (*said.get(key, ()), *found) for key, found in more.items() if found}
        said |= layer.given | added | ({"env": env} if env else {}) | ({"tag": tags} if tags else {})
    return {field: value for field, value in said.items() if field in JobOptions.model_fields}


def _named(
    path: Path, document: Document[JobFile], where: Loc, target: str | None, said: Mapping[str, Any]
) -> JobSpec:
    """The job of a file; what is wrong with its program is wrong in that place."""
    try:
        return job_of(target or "", said, folder=path.parent)
    except UsageError as exc:
        why = f"{exc.what}: {exc.why}" if exc.why else exc.what
        problem = Problem(document.file, *document.place(where), dotted(where), exc.code, why, exc.fix)
        raise SpecError(document.file, (problem,), kind=JOB_FILE.name) from exc


def job_schema() -> dict[str, Any]:
    """The JSON Schema of a job file. What it can't express, `submit` still refuses."""
    return {
        "$schema": SCHEMA_DIALECT,
        **JobFile.model_json_schema(),
        "title": "clusterctl job file",
        "description": "One job for `clusterctl submit`, or several variants of it.",
    }
