# Datasets in, results out. A bucket that holds anything is not deleted with the cluster: force_destroy is off, so
# that Google refuses. prevent_destroy would refuse to delete an empty one too, and all else with it.

resource "google_storage_bucket" "cluster" {
  #checkov:skip=CKV_GCP_62: who reads a training set is not worth a second bucket; Cloud Audit Logs has it where it is
  #checkov:skip=CKV_GCP_78: old versions of checkpoints would be paid for and never read
  count = var.bucket.create ? 1 : 0

  project                     = var.project
  name                        = var.bucket.name
  location                    = var.region
  labels                      = var.labels
  force_destroy               = false
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  dynamic "encryption" {
    for_each = var.kms_key == null ? [] : [var.kms_key]

    content {
      default_kms_key_name = encryption.value
    }
  }
}

resource "google_storage_bucket_iam_member" "host" {
  for_each = var.members

  bucket = var.bucket.create ? google_storage_bucket.cluster[0].name : var.bucket.name
  role   = "roles/storage.objectUser"
  member = each.value
}
