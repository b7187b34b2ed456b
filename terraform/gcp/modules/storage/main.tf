# The shared folder of a cluster with storage.keep: a disk of the controller, or a Filestore instance. It is removed
# from the state before the cluster is destroyed, and imported by the next cluster. Terraform never deletes it.

resource "google_compute_disk" "shared" {
  count = var.disk == null ? 0 : 1

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
  count = var.filestore == null ? 0 : 1

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
      ip_ranges   = var.cidr == null ? null : [var.cidr]
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
