output "host" {
  description = "Address and properties of the controller."
  value       = module.host.hosts[var.host.name]
}
