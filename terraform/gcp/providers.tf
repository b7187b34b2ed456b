provider "google" {
  project = var.project
  region  = var.region
  zone    = var.zone

  # All calls are counted on the cluster's project, even if the login or the environment names another project.
  billing_project       = var.project
  user_project_override = true
}
