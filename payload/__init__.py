"""Training on many ranks over MPI, in NumPy or CuPy: the program that runs on a cluster's nodes.

Begin with ``minimal``, the same training of a GPT in one file. Then read from the top: ``commands`` has a
module for each command; ``training`` is the loop and its measurements; ``checkpoint`` and ``saved_model`` are
its files; ``parallel`` says which rank does which part; ``models`` are built from the layers in ``nn``;
``comm`` carries sums between ranks; ``device`` is the one place that knows NumPy from CuPy. ``cli`` reads
settings and writes records; ``node`` supervises a job and its ranks, and reads a node's sensors.
"""
