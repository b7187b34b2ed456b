# A bucket for datasets and results. Without force_destroy, Google refuses to delete a bucket with objects, so it outlives
# the cluster. prevent_destroy would also prevent the deletion of an empty bucket and of all other resources.

resource "google_storage_bucket" "cluster" {
  #checkov:skip=CKV_GCP_62: access logs of a training set are not worth a second bucket; Cloud Audit Logs can record them
  #checkov:skip=CKV_GCP_78: old versions of checkpoints would be billed and never read
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

  lifecycle {
    # See google_compute_instance.host of the module instance.
    ignore_changes = [enable_object_retention, hierarchical_namespace]
  }
}

resource "google_storage_bucket_iam_member" "host" {
  for_each = var.members

  bucket = var.bucket.create ? google_storage_bucket.cluster[0].name : var.bucket.name
  role   = "roles/storage.objectUser"
  member = each.value
}
