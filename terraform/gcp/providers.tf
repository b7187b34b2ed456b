locals {
  # Seconds between the provider's questions whether an operation has ended, 10 by default. Google counts requests by the
  # minute, so they grow with the number of hosts that are made at once: 100, which is clusterctl's -parallelism.
  poll_s = max(2, ceil(min(length(var.hosts), 100) / 20))
}

provider "google" {
  project = var.project
  region  = var.region
  zone    = var.zone

  # All calls are counted on the cluster's project, even if the login or the environment names another project.
  billing_project       = var.project
  user_project_override = true

  poll_interval = "${local.poll_s}s"

  # How long changes of a policy are collected, 3 s by default. Only a few of them are made at once.
  batching {
    send_after = "200ms"
  }
}
