"""Job files: what the flags of `submit` can say, in YAML, with named variants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, StringConstraints

from clusterctl.errors import Problem, SpecError, UsageError
from clusterctl.spec.base import HERE
from clusterctl.spec.job import JOB_PATTERN_TEXTS, JobOptions, JobSpec, job_of, job_options
from clusterctl.spec.messages import Finding, did_you_mean, shown
from clusterctl.spec.parse import Filetype, parse, read_text
from clusterctl.spec.source import Source, read_source

_MAX_NAME = 64
_VARIANT: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$"

VariantName = Annotated[str, StringConstraints(pattern=_VARIANT)]


class Variant(JobOptions):
    """What a variant overrides in the file; its variables are added to the file's."""

    job: str | None = Field(
        None, description="a bundled job, or the path of a script", examples=["train", "./train.py"]
    )


class JobFile(Variant):
    """One job, or several that differ in what their variants say. Paths are relative to the file."""

    variants: Mapping[VariantName, Variant] = Field(
        {}, description="variants by name, with what each overrides; all are submitted"
    )


def _findings(values: Mapping[str, object]) -> Iterator[Finding]:
    """Each job of the file needs a program."""
    variants = values.get("variants")
    if "job" in values:
        return
    hint = "write job: train, or the path of a script"
    if not isinstance(variants, Mapping) or not variants:
        yield Finding(("job",), "job is missing", hint)
        return
    for name, variant in variants.items():
        if isinstance(variant, Mapping) and "job" not in variant:
            yield Finding(("variants", name), "job is missing, here and in the file", hint, at_key=True)


JOB_FILE: Final = Filetype(
    name="job file",
    model=JobFile,
    words={**JOB_PATTERN_TEXTS, _VARIANT: "at most 32 letters, digits, dots, dashes or underscores"},
    findings=_findings,
    missing="name a file that exists",
    empty="write job: train, or the path of a script",
    as_text=frozenset({"args", "env"}),
)


def jobs_of_file(
    path: Path, flags: Mapping[str, object], variants: Sequence[str] = ()
) -> tuple[JobSpec, ...]:
    """The jobs of a job file: its one job, or all its variants, or those named. Flags win over the file.

    Raises:
        UsageError: the file can't be read, has no such variant, or flags are wrong.
        SpecError: the file is wrong.
    """
    return _jobs(path, _read(path), job_options(flags), variants)


def _read(path: Path) -> JobFile:
    text = read_text(path, JOB_FILE)
    source = read_source(text, str(path), empty="")
    if isinstance(source, Source) and "partitions" in source.root.keys and "job" not in source.root.keys:
        raise UsageError(
            f"{path} describes a cluster, not a job",
            fix=f"`clusterctl -f {path} up` raises it; what to submit is named by the key job of a job file",
        )
    return parse(text, str(path), JOB_FILE, context={HERE: path.parent})


def _jobs(path: Path, file: JobFile, flags: JobOptions, chosen: Sequence[str]) -> tuple[JobSpec, ...]:
    for name in chosen:
        if name not in file.variants:
            known = ", ".join(file.variants) or "none"
            near = did_you_mean(name, file.variants)
            raise UsageError(f"{path} has no variant {shown(name)}", fix=near or f"its variants: {known}")
    names = dict.fromkeys(chosen or file.variants)
    if not names:
        return (_named(path, ("job",), file.job, _layered(file, flags)),)
    jobs = []
    for name in names:
        variant = file.variants[name]
        said = _layered(file, variant, flags)
        where = ("variants", name, "job") if variant.job else ("job",)
        job = _named(path, where, variant.job or file.job, said)
        if variant.name is None or (flags.name is not None and len(names) > 1):
            job = job.model_copy(update={"name": f"{job.name[: _MAX_NAME - len(name) - 1]}-{name}"})
        jobs.append(job)
    return tuple(jobs)


def _layered(*layers: JobOptions) -> dict[str, Any]:
    """What several say together, the last wins; variables are added up."""
    said: dict[str, Any] = {}
    for layer in layers:
        env = {**said.get("env", {}), **layer.env}
        said |= layer.given | ({"env": env} if env else {})
    return {field: value for field, value in said.items() if field in JobOptions.model_fields}


def _named(path: Path, where: tuple[str, ...], target: str | None, said: Mapping[str, Any]) -> JobSpec:
    """The job of a file; what is wrong with its program is wrong in that place."""
    try:
        return job_of(target or "", said, folder=path.parent)
    except UsageError as exc:
        source = read_source(read_text(path, JOB_FILE), str(path), empty="")
        if not isinstance(source, Source):  # it was changed meanwhile
            raise
        spot = source.spot(where)
        why = f"{exc.what}: {exc.why}" if exc.why else exc.what
        problem = Problem(str(path), spot.line, spot.column, ".".join(where), why, exc.fix)
        raise SpecError(str(path), (problem,), kind=JOB_FILE.name) from exc
