"""Runs a module of support's on some ranks of one thread each, as the payload itself is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n")
_LAUNCHERS = ("SLURM_", "OMPI_", "PMIX_", "PMI_")
# Each library is to choose its own.
_KERNELS = (
    "OPENBLAS_",
    "MKL_",
    "ONEDNN_",
    "DNNL_",
    "ATEN_",
    "NPY_",
)
AVX2 = {
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
}
"""Variables with which NumPy and PyTorch do not use AVX-512."""


def run(module: str, *arguments: object, ranks: int = 2, avx2: bool = False) -> str:
    """Return what the ranks print on standard output. Their standard error is shown as it comes.

    avx2: whether NumPy and PyTorch may use AVX2 but not AVX-512. Default: all that the processor
        has.

    Raises:
        SystemExit: a rank failed.
    """
    root = str(Path(__file__).parents[2])
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCHERS + _KERNELS)
    }
    argv = [*_MPIRUN, str(ranks), sys.executable, "-m", module, *map(str, arguments)]
    env = {**clean, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", **(AVX2 if avx2 else {})}
    done = subprocess.run(argv, env=env, cwd=root, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{module} {' '.join(map(str, arguments))} failed")
    return done.stdout
