"""What clusterctl keeps on the user's machine."""
