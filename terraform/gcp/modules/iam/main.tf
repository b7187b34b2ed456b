# A service account for each role. All may write logs and metrics. Modules grant other rights with their resources.

locals {
  roles = {
    controller = "${var.prefix}-c"
    compute    = "${var.prefix}-n"
  }

  granted = ["roles/logging.logWriter", "roles/monitoring.metricWriter"]
}

resource "google_service_account" "role" {
  for_each = local.roles

  project      = var.project
  account_id   = each.value
  display_name = "${var.prefix} ${each.key}"
  description  = "What the ${each.key} hosts of the cluster ${var.prefix} act as. ${var.mark}"
}

resource "google_project_iam_member" "granted" {
  for_each = {
    for pair in setproduct(keys(local.roles), local.granted) : "${pair[0]} ${pair[1]}" => { role = pair[0], grant = pair[1] }
  }

  project = var.project
  role    = each.value.grant
  member  = google_service_account.role[each.value.role].member
}
