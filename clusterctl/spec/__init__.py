"""The models of cluster specs and job files, and the functions that load and check these files."""
