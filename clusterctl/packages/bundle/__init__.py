"""The offline bundle: everything that a cluster is installed from, in one file, for air-gapped hosts."""
