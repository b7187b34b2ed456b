output "host" {
  description = "Where the controller is, and what it is."
  value       = module.host.host
}
