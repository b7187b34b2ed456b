"""A real Slurm cluster on this one Linux machine: systemd-nspawn nodes on a bridge of their own.

The user's side (`provider`) runs as the current user. Machine work (`image`, `machine`, `system`) is
done by one small helper (`helper`), started with ``sudo -n`` when the caller is not root; its state is
root's. Both sides share `layout`.
"""
