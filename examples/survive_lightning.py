"""Let a Lightning training survive, as survive.py does for other programs: copy both files beside
yours.

trainer = L.Trainer(callbacks=[survive_lightning.Survive()], enable_checkpointing=False)
trainer.fit(model, data, ckpt_path=survive.newest("checkpoints"))
"""

import os
import signal
import time
from pathlib import Path

import lightning as L  # noqa: N812, as Lightning's documentation has it
import survive


class Survive(L.Callback):
    def __init__(self, folder="checkpoints", seconds=600):
        self.folder = Path(folder)
        self.seconds = seconds
        self.saved = time.monotonic()
        self.signalled = False

    def on_train_start(self, trainer, *_):
        # These replace Lightning's handlers, which requeue the job themselves or wait for other
        # ranks.
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, lambda *_: setattr(self, "signalled", True))
        if trainer.strategy.broadcast(trainer.global_step) != trainer.global_step:
            raise RuntimeError("ranks resumed from different checkpoints")

    def on_train_batch_end(self, trainer, *_):
        if trainer.is_global_zero:
            survive.show_progress(trainer.global_step)
        any_rank = trainer.strategy.reduce_boolean_decision
        due = trainer.is_global_zero and time.monotonic() - self.saved >= self.seconds
        if not any_rank(due or self.signalled, all=False):
            return
        stop = any_rank(self.signalled, all=False)
        if trainer.is_global_zero:
            survive.save(self.folder, trainer.global_step, trainer.save_checkpoint)
        else:
            # All ranks take part, and only rank 0 writes.
            trainer.save_checkpoint("unused")
        self.saved = time.monotonic()
        if stop:
            trainer.strategy.barrier()
            os._exit(75)
