output "disks" {
  description = "Ids of the disks that the controller has for it: one, or none."
  value       = google_compute_disk.shared[*].id
}

output "ranges" {
  description = "Addresses that a Filestore instance calls the hosts from: one range, or none."
  value       = [for each in google_filestore_instance.shared : each.networks[0].reserved_ip_range]
}

output "filestore" {
  description = "Where it is mounted from, and what; null where it is a disk."
  value = one([for each in google_filestore_instance.shared : {
    server = each.networks[0].ip_addresses[0]
    path   = "/${each.file_shares[0].name}"
  }])
}
