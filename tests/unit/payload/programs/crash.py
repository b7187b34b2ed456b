"""One rank, named by the argument, breaks while the others wait for it."""

import sys

from payload.comm import mpi

comm = mpi.start()
if comm.rank == int(sys.argv[1]):
    raise ZeroDivisionError("this rank breaks")
comm.allgather(None)
