"""A real Slurm cluster on one Linux machine: systemd-nspawn nodes on their own bridge.

`provider` runs as the current user. For work on the machine (`image`, `machine`, `system`) it
starts `helper` as root, with ``sudo -n`` if needed. Root owns the helper's state. Both sides use
`layout`.
"""
