output "name" {
  description = "Name of the bucket."
  value       = var.bucket.name
}
