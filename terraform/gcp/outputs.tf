output "hosts" {
  description = "The hosts by their hostname: where they are, and what they are."
  value       = merge(module.nodes.hosts, { (local.controller.name) = module.controller.host })
}

output "network_cidr" {
  description = "Addresses that the hosts are on; null for a subnetwork that was there already."
  value       = module.network.cidr
}

output "shared" {
  description = "The shared folder: who serves it, and which path is mounted."
  value = (
    var.filestore == null
    ? { kind = "nfs", server = module.controller.host.address, path = "/shared" }
    : { kind = "filestore", server = module.filestore[0].address, path = "/${module.filestore[0].share}" }
  )
}

output "bucket" {
  description = "Name of the bucket that the hosts may read and write; null without one."
  value       = var.bucket == null ? null : module.bucket[0].name
}
