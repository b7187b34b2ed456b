output "network" {
  description = "Id of the network."
  value       = local.network
}

output "subnetwork" {
  description = "Id of the subnetwork that hosts are on."
  value       = local.subnetwork
}

output "cidr" {
  description = "The subnetwork's addresses; null for one that was there already."
  value       = local.new ? google_compute_subnetwork.cluster[0].ip_cidr_range : null
}
