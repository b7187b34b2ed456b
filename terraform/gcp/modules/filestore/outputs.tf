output "address" {
  description = "Address of the NFS server."
  value       = google_filestore_instance.shared.networks[0].ip_addresses[0]
}

output "range" {
  description = "Address range from which the instance calls the hosts."
  value       = google_filestore_instance.shared.networks[0].reserved_ip_range
}

output "share" {
  description = "Name of the share."
  value       = google_filestore_instance.shared.file_shares[0].name
}
