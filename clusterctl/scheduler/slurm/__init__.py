"""How Slurm is asked, and the records of jobs that answer in its place."""
