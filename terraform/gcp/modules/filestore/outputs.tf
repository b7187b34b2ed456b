output "address" {
  description = "Address that it is mounted from."
  value       = google_filestore_instance.shared.networks[0].ip_addresses[0]
}

output "range" {
  description = "Addresses that it calls the hosts from."
  value       = google_filestore_instance.shared.networks[0].reserved_ip_range
}

output "share" {
  description = "Name of what is mounted."
  value       = google_filestore_instance.shared.file_shares[0].name
}
