"""A job's life: JobSpec -> script -> sbatch -> job, and what happens to it after."""
