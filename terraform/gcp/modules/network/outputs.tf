output "network" {
  description = "Id of the network."
  value       = local.network
}

output "subnetwork" {
  description = "Id of the hosts' subnetwork."
  value       = local.subnetwork
}

output "cidr" {
  description = "Address range of the subnetwork. Null for an existing subnetwork."
  value       = local.new ? google_compute_subnetwork.cluster[0].ip_cidr_range : null
}
