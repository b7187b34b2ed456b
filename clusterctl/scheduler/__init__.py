"""Schedulers: the interface for running jobs, its values, and its implementations for Slurm and
mpirun.
"""
