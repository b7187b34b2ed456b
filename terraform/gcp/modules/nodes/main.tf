# The nodes, by partition and hostname, so that another number of nodes changes only new and removed nodes. A changed node
# is replaced, because all its data can be restored.

resource "google_compute_resource_policy" "compact" {
  for_each = var.placements

  project = var.project
  region  = var.region
  name    = each.value

  description = var.mark

  group_placement_policy {
    collocation = "COLLOCATED"
  }
}

module "partition" {
  source   = "../instance"
  for_each = toset([for host in var.hosts : host.partition])

  hosts              = { for name, host in var.hosts : name => host if host.partition == each.key }
  common             = var.common
  service_account    = var.service_account
  placement_policies = { for name, policy in google_compute_resource_policy.compact : name => policy.id }
  manageable         = var.manageable
  stop_to_change     = false
}
