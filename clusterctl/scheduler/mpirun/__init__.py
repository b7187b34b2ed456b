"""Jobs without a scheduler: plain mpirun, one at a time, each a unit of systemd on its first node."""
