"""A run's checkpoints for the training loop: choosing the checkpoint to resume from, and saving new
ones.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from payload.checkpoint.folder import FolderLock, complete, prepare
from payload.checkpoint.identity import refuse_other_settings
from payload.checkpoint.saver import Saver
from payload.checkpoint.shards import (
    BrokenError,
    CheckpointManifest,
    CheckpointReader,
    held_shards,
    own_state,
    read_data,
    read_manifest,
    set_scalars,
    verify,
)
from payload.cli.config import TrainConfig
from payload.cli.settings import to_record
from payload.comm.base import Communicator, on_all_ranks
from payload.errors import UsageError
from payload.parallel.engine import Engine

# A variable of trainings that clusterctl has submitted: their options of `clusterctl submit`.
SUBMITTED_WITH = "CLUSTERCTL_SUBMITTED_WITH"

if TYPE_CHECKING:
    from payload.cli.report import ResultWriter


class CheckpointSession:
    """A run's checkpoints: the checkpoint from which the run resumes, and the checkpoints that it
    saves.
    """

    def __init__(self, config: TrainConfig, world: Communicator) -> None:
        """Prepare the folder of checkpoints, and choose the checkpoint to resume from.

        Raises UsageError on every rank if that checkpoint is damaged, or the folder cannot be used.
        """
        settings = config.checkpoints
        self._config = config
        self._folder = settings.checkpoints or config.run.out / "checkpoints"
        start = start_of(settings.resume, self._folder, world)
        self._lock: FolderLock | None = None
        if settings.save_interval and not config.batch.find:
            self._lock = on_all_ranks(
                world, lambda: FolderLock(self._folder) if world.rank == 0 else None
            )
            prepare(self._folder, world)
            refuse_others(self._folder, start, world)
        self.chosen = choose(start, self._folder, world)

    @property
    def notes(self) -> list[str]:
        """Lines for the user: ``--resume auto`` has found no checkpoint."""
        if self.chosen or self._config.checkpoints.resume != "auto":
            return []
        note = f"--resume auto: no checkpoint in {self._folder}, so training starts from zero"
        job = "; `clusterctl submit train --from-run RUN` continues another run"
        return [note + (job if SUBMITTED_WITH in os.environ else "")]

    @property
    def data_state(self) -> Mapping[str, Any] | None:
        """State of the data set, such as its tokenizer, in the resumed checkpoint. None: no
        checkpoint.
        """
        return self.chosen.data_state if self.chosen else None

    def saver(
        self,
        engine: Engine,
        now: CheckpointManifest,
        report: ResultWriter,
        *,
        data_state: Mapping[str, Any],
        save_model: Callable[[Path], Mapping[str, Any]],
    ) -> AbstractContextManager[Saver | None]:
        """Return the ``Saver`` of this run; without ``--save-interval``, a context manager that
        yields None.

        now: this run's manifest, from ``describe``. data_state, save_model: see ``Saver``.
        """
        settings = self._config.checkpoints
        if not settings.save_interval:
            return nullcontext()
        return Saver(
            engine,
            self._folder,
            now,
            report,
            interval=settings.save_interval,
            keep=settings.keep,
            wait=settings.save == "sync",
            data_state=data_state,
            lock=self._lock,
            save_model=save_model,
            saved=self._own_iteration(),
        )

    def _own_iteration(self) -> int:
        """Return the iteration of the resumed checkpoint if it is in this run's folder, else 0."""
        if self.chosen is None or self.chosen.path.resolve().parent != self._folder.resolve():
            return 0
        return self.chosen.manifest.iteration

    def describe(self, engine: Engine, identity: Mapping[str, Any]) -> CheckpointManifest:
        """Return a manifest of this run, still without iteration, scalars and files.

        identity: settings that must be the same in a run that resumes from this run's checkpoints.
        """
        config = self._config
        mesh = engine.mesh
        # The error feedback of compressed gradients is stored as a multiple of the loss scale.
        compressed = config.layout.compress != "none"
        return CheckpointManifest(
            iteration=0,
            layout={
                "dp": mesh.dp.size,
                "tp": mesh.tp.size,
                "pp": mesh.pp.size,
                "zero": config.layout.zero,
                "bucket-mib": config.layout.bucket_mib,
                **({"loss-scale": config.precision.loss_scale or 1} if compressed else {}),
            },
            identity=identity,
            scalars={},
            config=to_record(config.placed()),
            files=(),
        )


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A verified checkpoint to resume from."""

    path: Path
    manifest: CheckpointManifest
    data_state: Mapping[str, Any]
    # Messages about newer checkpoints that are broken.
    notes: list[str]


@dataclass(frozen=True, slots=True)
class ResumedState:
    """The state from which a run continues."""

    # The last finished iteration. 0: training starts from scratch.
    iteration: int = 0
    notes: list[str] = field(default_factory=list)
    path: Path | None = field(default=None, compare=False)
    model: Mapping[str, Any] = field(default_factory=dict, compare=False)
    # If False, an evaluation is due before the next iteration.
    evaluated: bool = True


def start_of(resume_from: str, folder: Path, world: Communicator) -> str:
    """Return the value of ``--resume`` that applies now.

    If Slurm has restarted the job, the run continues from a checkpoint of its own if it has written
    any.
    """
    restarted = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    return world.allgather("auto" if restarted and complete(folder) else resume_from)[0]


def choose(resume_from: str, folder: Path, world: Communicator) -> ResumePoint | None:
    """Verify and return the checkpoint that ``--resume`` selects. None: start from scratch.

    resume_from: ``never``, ``auto`` (the newest undamaged checkpoint in ``folder``, or in the
        earlier run of CLUSTERCTL_FROM_RUN if ``folder`` has no checkpoints), or a checkpoint's
        path.

    Raises UsageError on every rank if that checkpoint, or for ``auto``, every checkpoint is
    damaged, or neither ``folder`` nor the given earlier run has checkpoints.
    """
    notes: list[str] = []
    newest_first = [Path(resume_from)] if resume_from != "never" else []
    earlier = os.environ.get("CLUSTERCTL_FROM_RUN")
    if resume_from == "auto":
        own = complete(folder) or (complete(Path(earlier, "checkpoints")) if earlier else {})
        newest_first = list(reversed(own.values()))
    newest_first = world.allgather(newest_first)[0]
    if resume_from == "auto" and earlier and not newest_first:
        raise UsageError(
            f"--resume auto: the earlier run {earlier} has no checkpoints; "
            "leave out --from-run to start from zero",
            code="run-without-checkpoints",
        )
    for path in newest_first:
        try:
            return ResumePoint(path, *_inspect(path, world), notes)
        except BrokenError as exc:
            notes.append(f"{path} is broken: {exc}")
            if resume_from != "auto":
                raise UsageError(
                    f"--resume: {path} is broken: {exc}", code="checkpoint-damaged"
                ) from exc
    if notes:
        raise UsageError(
            f"--resume auto: all checkpoints are broken: {'; '.join(notes)}; remove them to "
            "start over",
            code="checkpoints-all-damaged",
        )
    return None


def command_to_resume(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the command that continues a stopped run, for a shell. argv: arguments, from ``train``
    on.
    """
    command, *words = argv
    if "--resume" in words:
        position = words.index("--resume")
        words[position : position + 2] = []
    words = [word for word in words if not word.startswith("--resume=")]
    if SUBMITTED_WITH not in env:
        return shlex.join(["python", "-m", "payload", command, *words, "--resume", "auto"])
    # clusterctl numbers the jobs of a cluster without Slurm.
    job = env.get("SLURM_JOB_ID") or env["CLUSTERCTL_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in env:
        job = "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}".format_map(env)
    options = shlex.split(env[SUBMITTED_WITH])
    cluster = options[0].removeprefix("--cluster=")
    run = f"{cluster}/{job}"
    return shlex.join(["clusterctl", "submit", command, *options, "--from-run", run, "--", *words])


def variables_to_set(env: Mapping[str, str]) -> list[str]:
    """Return the variables of ``command_to_resume`` that lack a value, because it may be secret."""
    words = shlex.split(env.get(SUBMITTED_WITH, ""))
    return [word.removeprefix("--env=") for word in words if word.startswith("--env=")]


def resume(chosen: ResumePoint | None, engine: Engine, now: CheckpointManifest) -> ResumedState:
    """Load a checkpoint into the engine. Without a checkpoint, return the state at the start of
    training.

    now: this run's manifest. Raises UsageError on every rank if a setting differs that must not
        change.
    """
    if chosen is None:
        return ResumedState()
    path = chosen.path
    manifest = chosen.manifest
    refuse_other_settings(path, manifest.identity, now.identity)
    same_layout = manifest.layout == now.layout
    on_all_ranks(engine.mesh.world, lambda: _load(engine, path, manifest, own=same_layout))
    note = f"resuming from {path}{'' if same_layout else _resharding(manifest, now, engine)}"
    return ResumedState(
        manifest.iteration, [*chosen.notes, note], path, manifest.model, manifest.evaluated
    )


def refuse_others(folder: Path, resume_from: str, world: Communicator) -> None:
    """Raise UsageError on every rank if the folder has checkpoints that this run would overwrite.

    These are checkpoints of another run, or of iterations that this run repeats.
    """

    def check() -> None:
        newer = list(complete(folder).values())
        if newer and Path(resume_from).resolve() != newer[-1].resolve():
            aim = "start from zero" if resume_from == "never" else f"continue from {resume_from}"
            raise UsageError(
                f"{folder} has checkpoints, the newest is {newer[-1].name}: continue from it with "
                f"--resume auto, or {aim} in another folder with --checkpoints",
                code="checkpoint-newer-exists",
            )

    # With `auto`, this run continues from the newest checkpoint.
    if resume_from != "auto":
        on_all_ranks(world, lambda: check() if world.rank == 0 else None)


def _inspect(path: Path, world: Communicator) -> tuple[CheckpointManifest, Mapping[str, Any]]:
    """Return a checkpoint's manifest and the state of its data set. Raises BrokenError for a
    damaged file.
    """

    def check() -> CheckpointManifest:
        manifest = read_manifest(path)
        for facts in manifest.files[world.rank :: world.size]:
            verify(path, facts)
        return manifest

    manifest = on_all_ranks(world, check)
    data_state = on_all_ranks(world, lambda: read_data(path) if world.rank == 0 else {})
    return manifest, world.allgather(data_state)[0]


def _resharding(saved: CheckpointManifest, now: CheckpointManifest, engine: Engine) -> str:
    def text(layout: Mapping[str, float]) -> str:
        return ", ".join(f"{name} {size}" for name, size in layout.items())

    own = "; the error feedback of compressed gradients is reset" if engine.own_state else ""
    return f", from {text(saved.layout)} to {text(now.layout)}{own}"


def _load(engine: Engine, path: Path, manifest: CheckpointManifest, *, own: bool) -> None:
    """Load this rank's shards from the checkpoint at ``path``. own: also ``own_state``, of this
    rank only.
    """
    # Own state fits only the layout of ranks that saved it.
    reader = CheckpointReader(path, manifest)
    restorable = [each for each in own_state(engine) if own and reader.holds(*each)]
    for shard, array in [*held_shards(engine), *restorable]:
        numbers = reader.read(shard, np.dtype(array.dtype))
        array[...] = numbers if isinstance(array, np.ndarray) else engine.device.asarray(numbers)
    set_scalars(engine, manifest.scalars)
    engine.storage.publish()
