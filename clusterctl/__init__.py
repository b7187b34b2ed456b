"""clusterctl: one typed file raises a Slurm cluster, trains on it, and brings the results home."""

__version__ = "0.1.0"
