"""How a site differs: own Slurm, somebody else's, mpirun without Slurm."""
