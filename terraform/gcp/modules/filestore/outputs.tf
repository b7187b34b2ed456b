output "address" {
  description = "Address of the NFS server."
  value       = google_filestore_instance.shared.networks[0].ip_addresses[0]
}

# The provider does not read the range that Google reserves (terraform-provider-google, issue 15984). It is a /29 for the
# basic tiers, and a /26 or a /24 for the others: reservedIpRange in Google's discovery document of Filestore.
output "range" {
  description = "Address range from which the instance calls the hosts."
  value = cidrsubnet(
    "${google_filestore_instance.shared.networks[0].ip_addresses[0]}/${startswith(var.settings.tier, "BASIC") ? 29 : 24}", 0, 0
  )
}

output "share" {
  description = "Name of the share."
  value       = google_filestore_instance.shared.file_shares[0].name
}
