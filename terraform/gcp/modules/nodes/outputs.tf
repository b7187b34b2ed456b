output "hosts" {
  description = "Where the nodes are, and what they are, by hostname."
  value       = { for name, node in module.node : name => node.host }
}
