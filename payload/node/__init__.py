"""A job on its nodes: supervisors of the job and its ranks, sensors, and the runner of Python programs."""
