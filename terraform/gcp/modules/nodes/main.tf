# The nodes, by hostname, so that another number of nodes changes only new and removed nodes. A changed node is
# replaced, because all its data can be restored.

resource "google_compute_resource_policy" "compact" {
  for_each = var.placements

  project = var.project
  region  = var.region
  name    = each.value

  description = var.mark

  group_placement_policy {
    collocation = "COLLOCATED"
  }

  lifecycle {
    # See google_compute_instance.host of the module instance.
    ignore_changes = [group_placement_policy[0].gpu_topology, workload_policy]
  }
}

module "node" {
  source   = "../instance"
  for_each = var.hosts

  name             = each.key
  host             = each.value
  common           = var.common
  service_account  = var.service_account
  placement_policy = each.value.placement == null ? null : google_compute_resource_policy.compact[each.value.placement].id
  manageable       = var.manageable
  stop_to_change   = false
}
