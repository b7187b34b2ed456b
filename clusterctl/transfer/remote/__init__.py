"""What runs on the cluster, from the text of these modules: standard library only, Python 3.9."""
