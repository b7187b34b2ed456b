output "hosts" {
  description = "Hostname -> address and properties of the node."
  value       = merge([for partition in module.partition : partition.hosts]...)
}
