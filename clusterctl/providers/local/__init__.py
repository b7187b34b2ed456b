"""A real Slurm cluster on one Linux machine: systemd-nspawn nodes on their own bridge.

`provider` runs as the current user. It starts a helper (`helper`) as root, with ``sudo -n`` if needed, for all
work on the machine (`image`, `machine`, `system`). Root owns the helper's state. Both sides use `layout`.
"""
