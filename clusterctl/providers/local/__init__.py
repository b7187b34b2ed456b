"""A real Slurm cluster on this one Linux machine: systemd-nspawn nodes on a bridge of their own.

The user's side (`provider`, `shares`, `client`) runs as whoever calls. Machine work (`image`, `network`,
`mounts`, `machine`, `residue`) is done by one small helper (`helper`), started with ``sudo -n`` when the
caller is not root; its state is root's. Both sides share `layout`.
"""
