provider "google" {
  project = var.project
  region  = var.region
  zone    = var.zone

  # All calls count on the cluster's project, whichever one the login or the environment names.
  billing_project       = var.project
  user_project_override = true
}
