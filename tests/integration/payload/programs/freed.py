"""What arrays free is used again: the kernel is asked for no page that was there before."""

import resource

import numpy as np

from payload.node.host import keep_freed_memory

keep_freed_memory()
asked = []
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [np.ones(1 << 18) for _ in range(8)]  # 16 MiB
    del arrays
    asked.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
assert asked[0] > 1000, asked
assert asked[1] + asked[2] < 100, asked
