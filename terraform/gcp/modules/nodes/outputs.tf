output "hosts" {
  description = "Hostname -> address and properties of the node."
  value       = { for name, node in module.node : name => node.host }
}
