output "hosts" {
  description = "Hostname -> address and properties of the host."
  value       = merge(module.nodes.hosts, { (local.controller.name) = module.controller.host })
}

output "network_cidr" {
  description = "Address range of the hosts. Null for an existing subnetwork."
  value       = module.network.cidr
}

output "shared" {
  description = "The shared folder: server, exported path, and device name of the controller's disk for it."
  value = merge(concat(
    [{
      kind   = "nfs"
      server = module.controller.host.address
      path   = "/shared"
      disk   = try(var.storage.disk, null) == null ? null : "shared"
    }],
    [for each in module.filestore : { kind = "filestore", server = each.address, path = "/${each.share}" }],
    [for each in [try(var.storage.filestore, null)] : {
      kind   = "filestore"
      server = each.server
      path   = each.path
    } if each != null],
  )...)
}

output "bucket" {
  description = "Name of the bucket that the hosts may read and write. Null without a bucket."
  value       = var.bucket == null ? null : module.bucket[0].name
}
