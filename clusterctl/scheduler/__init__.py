"""What runs jobs, as the rest of clusterctl sees it: the contract, and the values that pass through it."""
