"""Training on many ranks over MPI, in NumPy or CuPy: the program that runs on a cluster's nodes.

Start with ``minimal``, the same training of a GPT in one file. ``commands`` has a module for each
command. ``training`` has the loop and its measurements; ``checkpoint`` and ``saved_model`` read and
write its files. ``parallel`` distributes the work over ranks; ``models`` are built from the layers
in ``nn``; ``comm`` communicates between ranks. ``device`` hides the difference between NumPy and
CuPy. ``cli`` reads settings and writes records; ``node`` supervises a job and its ranks, and reads
a node's sensors.
"""
