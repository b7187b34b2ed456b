# A shared folder that outlives clusters: a disk for their controllers, or a Filestore instance. No cluster's state has it,
# and Terraform never deletes it.

provider "google" {
  project = var.project

  # All calls are counted on this project, even if the login or the environment names another project.
  billing_project       = var.project
  user_project_override = true
}

resource "google_project_service" "needed" {
  for_each = var.enable_apis ? toset(var.services) : toset([])

  project = var.project
  service = each.value
  # Other users of the project may need the service.
  disable_on_destroy = false
}

resource "google_compute_disk" "shared" {
  count      = var.disk == null ? 0 : 1
  depends_on = [google_project_service.needed]

  project = var.project
  zone    = var.zone
  name    = var.name
  type    = var.disk.type
  size    = var.disk.size_gib
  labels  = var.labels

  dynamic "disk_encryption_key" {
    for_each = var.kms_key == null ? [] : [var.kms_key]

    content {
      kms_key_self_link = disk_encryption_key.value
    }
  }

  lifecycle {
    prevent_destroy = true
  }
}

resource "google_filestore_instance" "shared" {
  count      = var.filestore == null ? 0 : 1
  depends_on = [google_project_service.needed]

  project  = var.project
  name     = var.name
  location = var.filestore.tier == "REGIONAL" ? var.region : var.zone
  tier     = var.filestore.tier
  # Google does not support keys for basic tiers.
  kms_key_name = startswith(var.filestore.tier, "BASIC") ? null : var.kms_key
  labels       = var.labels

  file_shares {
    name        = "shared"
    capacity_gb = var.filestore.capacity_gib

    nfs_export_options {
      access_mode = "READ_WRITE"
      squash_mode = "NO_ROOT_SQUASH"
    }
  }

  networks {
    network      = var.network
    modes        = ["MODE_IPV4"]
    connect_mode = var.connect_mode
  }

  lifecycle {
    prevent_destroy = true
  }
}
