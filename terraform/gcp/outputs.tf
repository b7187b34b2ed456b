output "hosts" {
  description = "The hosts by their hostname: where they are, and what they are."
  value       = merge(module.nodes.hosts, { (local.controller.name) = module.controller.host })
}

output "network_cidr" {
  description = "Addresses that the hosts are on; null for a subnetwork that was there already."
  value       = module.network.cidr
}

output "shared" {
  description = "The shared folder: who serves it, which path is mounted, and the controller's disk that it is on, by its device's name."
  value = merge(concat(
    [{
      kind   = "nfs"
      server = module.controller.host.address
      path   = "/shared"
      disk   = try(var.storage.disk, null) == null ? null : "shared"
    }],
    [for each in module.filestore : { kind = "filestore", server = each.address, path = "/${each.share}" }],
    [for each in module.storage : merge({ kind = "filestore" }, each.filestore) if each.filestore != null],
  )...)
}

output "bucket" {
  description = "Name of the bucket that the hosts may read and write; null without one."
  value       = var.bucket == null ? null : module.bucket[0].name
}
