"""Training on many ranks over MPI, in NumPy or CuPy: the program that runs on a cluster's nodes.

Begin with ``minimal``, the same training of a GPT in one file. Then from the top: ``train`` is the loop;
``build`` makes of settings what they name; ``parallel`` says which rank does what; ``models`` are built from
the layers in ``nn``; ``comm`` carries sums between ranks; ``device`` is the one place that knows NumPy from
CuPy.

``metrics``, ``timing`` and ``trace`` tell what a run does; ``bench``, ``gemm`` and ``allreduce`` measure
its parts alone. ``probe`` asks whether ranks reach each other, ``telemetry`` watches a node, and ``align``
brings metrics and telemetry together.
"""

__version__ = "0.1.0"
