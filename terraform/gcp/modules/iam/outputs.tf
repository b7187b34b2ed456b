output "emails" {
  description = "Role -> email of its service account."
  value       = { for role, account in google_service_account.role : role => account.email }
}

output "members" {
  description = "Role -> its service account as an IAM member."
  value       = { for role, account in google_service_account.role : role => account.member }
}
