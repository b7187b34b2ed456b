# A bucket for datasets and results, which Terraform never deletes: also not with `create` turned off, or another name.

resource "google_storage_bucket" "cluster" {
  #checkov:skip=CKV_GCP_62: access logs of a training set are not worth a second bucket; Cloud Audit Logs can record them
  #checkov:skip=CKV_GCP_78: old versions of checkpoints would be billed and never read
  count = var.bucket.create ? 1 : 0

  project                     = var.project
  name                        = var.bucket.name
  location                    = var.region
  labels                      = var.labels
  deletion_policy             = "ABANDON"
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
