"""The mark of what belongs to clusterctl alone, for Ansible's modules on hosts as well."""

# In the paths of all of its files, and in the names of its units.
OWN = "clusterctl"
