"""Files to the cluster and back: known by their sha256, sent once, gone on with where it stopped."""
