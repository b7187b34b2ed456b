"""A task of a job array: fit a line by gradient descent with the learning rate of the task.

clusterctl submit examples/sweep.py --array 0-3 --wait
"""

import json
import os
from pathlib import Path

import numpy as np

RATES = (0.01, 0.03, 0.1, 0.3)

task = int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))
rate = RATES[task]
x = np.linspace(-1, 1, 200)
y = 3 * x + 1 + np.random.default_rng(0).normal(scale=0.1, size=x.size)
slope = offset = 0.0
for _ in range(100):
    error = slope * x + offset - y
    slope -= rate * 2 * float((error * x).mean())
    offset -= rate * 2 * float(error.mean())
loss = float(((slope * x + offset - y) ** 2).mean())
Path("result.json").write_text(json.dumps({"task": task, "rate": rate, "loss": loss}) + "\n")
print(f"task {task}: rate {rate:g}, loss {loss:.4f}")
