terraform {
  required_version = ">= 1.6"

  required_providers {
    # One minor version for each release of clusterctl, so that colleagues who share a state have the same, and that no new
    # version changes what is replaced.
    google = {
      source  = "hashicorp/google"
      version = "~> 8.7.0"
    }
  }
}
