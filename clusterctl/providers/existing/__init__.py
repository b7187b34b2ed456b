"""The provider of a Slurm cluster that other people operate: clusterctl has an ordinary account on
it.
"""
