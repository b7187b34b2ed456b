# A shared folder that outlives the controller. Root has root's rights on it, so that Ansible can create homes.

resource "google_filestore_instance" "shared" {
  project  = var.project
  name     = var.name
  location = var.location
  tier     = var.settings.tier
  # Google does not support keys for basic tiers.
  kms_key_name = startswith(var.settings.tier, "BASIC") ? null : var.kms_key
  labels       = var.labels

  file_shares {
    name        = "shared"
    capacity_gb = var.settings.capacity_gib

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
}
