"""Let a PyTorch training survive time limits, failures and dead nodes: copy this file beside your
program.

torch_ddp.py and lightning_mlp.py use it. docs/restarts.md of clusterctl explains it.
"""

import os
import signal
import time
import zipfile
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist


def newest(folder):
    """Return the path of the newest whole checkpoint, or None if there is no checkpoint."""
    paths = sorted(Path(folder).glob("step-*.pt"), reverse=True)
    for path in paths:
        # torch.save writes zip files, which have checksums.
        with suppress(Exception), zipfile.ZipFile(path) as file:
            if file.testzip() is None:
                return path
        print(f"{path} is damaged", flush=True)
    if paths:
        raise RuntimeError(f"all checkpoints are damaged: remove {folder} to begin from zero")
    return None


def show_progress(step):
    """Write the number of steps done to the file in which clusterctl looks for it."""
    if "CLUSTERCTL_HEARTBEAT" in os.environ:
        # Without O_TRUNC, the file has a number at any time.
        file = os.open(os.environ["CLUSTERCTL_HEARTBEAT"], os.O_WRONLY | os.O_CREAT)
        os.write(file, b"%d\n" % step)
        os.close(file)


def save(folder, step, write, keep=2):
    """Have write(path) write a checkpoint. A crash at any time leaves the previous checkpoints
    whole.
    """
    folder.mkdir(exist_ok=True)
    # A rank that is cut off may still write while its successor runs.
    new = folder / f"step-{step:08}.{os.environ.get('SLURM_RESTART_COUNT', '0')}.tmp"
    write(new)
    with new.open("rb") as file:
        os.fsync(file)
    new.replace(folder / f"step-{step:08}.pt")
    for old in [*folder.glob("*.tmp"), *sorted(folder.glob("step-*.pt"))[:-keep]]:
        old.unlink(missing_ok=True)


class Training:
    """Resume from the newest checkpoint. parts: objects with state_dict, the same on all ranks."""

    def __init__(self, folder="checkpoints", seconds=600, **parts):
        self.folder = Path(folder)
        self.seconds = seconds
        self.parts = parts
        self.step = 0
        self.saved = time.monotonic()
        self.signalled = False
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, lambda *_: setattr(self, "signalled", True))
        # Rank 0 chooses, because NFS may show other ranks an older list of files.
        path = [newest(folder) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(path)
        if path[0]:
            state = torch.load(path[0], map_location="cpu", weights_only=True)
            self.step = state["step"]
            for name, part in parts.items():
                part.load_state_dict(state[name])

    def end_step(self):
        """Save if it is time. After a signal to any rank, save and exit with 75 on all ranks."""
        self.step += 1
        if dist.get_rank() == 0:
            show_progress(self.step)
        # A signal reaches the ranks in different steps.
        stop = torch.tensor(
            float(self.signalled), device="cuda" if dist.get_backend() == "nccl" else "cpu"
        )
        dist.all_reduce(stop)
        if dist.get_rank() == 0 and (stop or time.monotonic() - self.saved >= self.seconds):
            state = {
                "step": self.step,
                **{name: part.state_dict() for name, part in self.parts.items()},
            }
            save(self.folder, self.step, lambda path: torch.save(state, path))
            self.saved = time.monotonic()
        if stop:
            # The launcher kills the other ranks as soon as a rank has exited.
            dist.barrier()
            print(f"stopped after step {self.step}, which is saved", flush=True)
            # PyTorch with Gloo may abort in a regular exit.
            os._exit(75)
