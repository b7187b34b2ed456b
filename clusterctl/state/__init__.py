"""The state of clusters on the user's machine: workspaces, inventories, and records of jobs and runs."""
