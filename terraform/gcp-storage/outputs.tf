output "disks" {
  description = "Id of the controller's disk for the shared folder. Empty for a Filestore instance."
  value       = google_compute_disk.shared[*].id
}

output "ranges" {
  description = "Address range from which a Filestore instance calls the hosts. Empty for a disk."
  # See the output `range` of the module filestore.
  value = [
    for each in google_filestore_instance.shared :
    cidrsubnet("${each.networks[0].ip_addresses[0]}/${startswith(each.tier, "BASIC") ? 29 : 24}", 0, 0)
  ]
}

output "filestore" {
  description = "Server and share of the Filestore instance. Null for a disk."
  value = one([for each in google_filestore_instance.shared : {
    server = each.networks[0].ip_addresses[0]
    path   = "/${each.file_shares[0].name}"
  }])
}
