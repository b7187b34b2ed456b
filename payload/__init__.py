"""Data-parallel training on MPI, in NumPy or CuPy: the program that runs on a cluster's nodes.

Read it from the top: ``train`` is the loop; ``parallel`` says which rank does what; ``models`` are built
from the layers in ``nn``; ``comm`` carries sums between ranks; ``device`` is the one place that knows NumPy
from CuPy. ``probe`` asks whether the ranks reach each other, ``telemetry`` watches a node.
"""

__version__ = "0.1.0"
