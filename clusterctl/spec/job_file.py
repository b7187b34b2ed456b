"""Job files, which describe a job or several variants of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from clusterctl.errors import Problem, SpecError, UsageError
from clusterctl.spec.base import HERE, PATTERNS, SCHEMA_DIALECT, Loc, SpecFault, dotted
from clusterctl.spec.job import JobSpec, job_of
from clusterctl.spec.job_options import (
    InVariants,
    JobOptions,
    SbatchText,
    job_options,
    options_with,
)
from clusterctl.spec.job_values import Argument, FilePattern
from clusterctl.spec.names import did_you_mean
from clusterctl.spec.parse import Document, Filetype, read_text
from clusterctl.spec.units import shown
from clusterctl.util.confine import reject_read

_MAX_NAME = 64
VariantName = Annotated[str, PATTERNS["variant"]]


class _Program(JobOptions):
    """The options of a job, and its program."""

    job: str | None = Field(
        None, description="a bundled job, or the path of a script", examples=["train", "./train.py"]
    )


class Variant(_Program):
    """A variant of a job: options that override options at the top of the file. `env` is merged
    with them.

    A list with a + at the end of its key is appended to the file's list. A list without + is
    rejected if the file also has the list.
    """

    more_args: tuple[Argument, ...] = Field(
        (), alias="args+", description="more arguments of the program"
    )
    more_include: tuple[FilePattern, ...] = Field(
        (), alias="include+", description="more include patterns"
    )
    more_exclude: tuple[FilePattern, ...] = Field(
        (), alias="exclude+", description="more exclude patterns"
    )
    more_outputs: tuple[FilePattern, ...] = Field(
        (), alias="outputs+", description="more outputs patterns"
    )
    more_slurm: tuple[SbatchText, ...] = Field(
        (), alias="slurm+", description="more options of sbatch"
    )


_LISTS: Final = options_with(variants=InVariants.APPENDED)
_MERGED: Final = options_with(variants=InVariants.MERGED)


class JobFile(_Program):
    """A job, or several variants of it. Paths are relative to the file."""

    variants: Mapping[VariantName, Variant] = Field(
        {},
        description="the options that each variant overrides, by its name; all variants are submitted",
    )


def _faults(file: JobFile) -> Iterator[SpecFault]:
    hint = "write job: train, or the path of a script"
    if "job" not in file.model_fields_set and not file.variants:
        yield SpecFault("job-missing", ("job",), "the key job is missing", hint)
    for name, variant in file.variants.items():
        if not {"job"} & (file.model_fields_set | variant.model_fields_set):
            yield SpecFault(
                "job-missing",
                ("variants", name),
                "the key job is missing, both here and at the top of the file",
                hint,
                at_key=True,
            )
        yield from _replaced_lists(file, name, variant)


def _replaced_lists(file: JobFile, name: str, variant: Variant) -> Iterator[SpecFault]:
    """Yield faults for lists of a variant that would silently replace lists at the top of the
    file.
    """
    for key in _LISTS:
        if key not in variant.model_fields_set:
            continue
        where = ("variants", name, key)
        append = f"write {key}+ to append to the file's {key}"
        if f"more_{key}" in variant.model_fields_set:
            message = f"the variant {name} has both {key} and {key}+"
            yield SpecFault("list-twice", where, message, f"join both lists; {append}")
        elif getattr(file, key):
            hint = f"{append}, or move the file's {key} into its variants"
            message = f"{key} would replace the {key} at the top of the file"
            yield SpecFault("list-would-replace", where, message, hint, at_key=True)


JOB_FILE: Final = Filetype(
    name="job file",
    model=JobFile,
    faults=_faults,
    missing="name a file that exists",
    empty="write job: train, or the path of a script",
    as_text=frozenset(
        {"args", "args+", "after", "env", "secret", *"grid list random exclude when".split()}
    ),
)


def jobs_of_file(
    path: Path, flags: Mapping[str, object], variants: Sequence[str] = ()
) -> tuple[JobSpec, ...]:
    """Return the jobs of a job file. Flags override options in the file.

    variants: names of the variants to return. Empty: all variants, or the file's job if it has no
        variants.

    Raises:
        UsageError: the file can't be read, a variant does not exist, or flags are wrong.
        SpecError: the content of the file is wrong.
    """
    reject_read(path)
    document = Document(read_text(path, JOB_FILE), str(path), JOB_FILE)
    if "partitions" in document.keys(()) and "job" not in document.keys(()):
        raise UsageError(
            f"{path} describes a cluster, not a job",
            code="file-invalid",
            about="job-file",
            fix=f"submit a job file, which has the key `job`; `clusterctl -f {path} up` creates "
            "the cluster",
        )
    options = job_options(flags)
    return tuple(
        job.model_copy(
            update={
                "places": {
                    name: f"`{name}` of {path.name}"
                    for name in job.model_fields_set.difference(options.model_fields_set)
                }
            }
        )
        for job in _jobs(path, document, options, variants)
    )


def _jobs(
    path: Path, document: Document[JobFile], flags: JobOptions, selected: Sequence[str]
) -> tuple[JobSpec, ...]:
    file = document.model({HERE: path.parent})
    for name in selected:
        if name not in file.variants:
            variant_names = ", ".join(file.variants) or "(none)"
            near = did_you_mean(name, file.variants)
            raise UsageError(
                f"{path} has no variant {shown(name)}",
                code="not-found",
                about="variant",
                fix=near or f"use one of its variants: {variant_names}",
            )
    names = dict.fromkeys(selected or file.variants)
    if not names:
        return (_job_of_file(path, document, ("job",), file.job, _layered(file, flags)),)
    jobs = []
    for name in names:
        variant = file.variants[name]
        options = _layered(file, variant, flags)
        where = ("variants", name, "job") if variant.job else ("job",)
        job = _job_of_file(path, document, where, variant.job or file.job, options)
        if variant.name is None or (flags.name is not None and len(names) > 1):
            job = job.model_copy(update={"name": f"{job.name[: _MAX_NAME - len(name) - 1]}-{name}"})
        jobs.append(job)
    return tuple(jobs)


def _layered(*layers: JobOptions) -> dict[str, Any]:
    """Merge options. Later layers override earlier layers; those like `env` and `args+` extend
    them.
    """
    options: dict[str, Any] = {}
    for layer in layers:
        more = {key: layer.given.get(f"more_{key}", ()) for key in _LISTS}
        added = {key: (*options.get(key, ()), *entries) for key, entries in more.items() if entries}
        given = {key: value for key in _MERGED if (value := getattr(layer, key))}
        merged = {key: _merged(options.get(key, ()), value) for key, value in given.items()}
        options |= layer.given | added | merged
    return {field: value for field, value in options.items() if field in JobOptions.model_fields}


def _merged(value: Any, more: Any) -> Any:
    """Return a mapping or a list together with another, in which equal entries occur once."""
    return (
        {**dict(value), **more} if isinstance(more, Mapping) else (*dict.fromkeys((*value, *more)),)
    )


def _job_of_file(
    path: Path,
    document: Document[JobFile],
    where: Loc,
    target: str | None,
    options: Mapping[str, Any],
) -> JobSpec:
    try:
        return job_of(target or "", options, folder=path.parent)
    except UsageError as exc:
        message = f"{exc.what}: {exc.why}" if exc.why else exc.what
        name = exc.about or exc.code
        problem = Problem(
            document.file, *document.place(where), dotted(where), name, message, exc.fix
        )
        raise SpecError(document.file, (problem,), kind=JOB_FILE.name) from exc


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema of a job file. `submit` also rejects mistakes that the schema can't
    express.
    """
    return {
        "$schema": SCHEMA_DIALECT,
        **JobFile.model_json_schema(),
        "title": "clusterctl job file",
        "description": "A job for `clusterctl submit`, or several variants of it.",
    }
