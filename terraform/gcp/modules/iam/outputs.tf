output "emails" {
  description = "Role -> the email of its service account."
  value       = { for role, account in google_service_account.role : role => account.email }
}

output "members" {
  description = "Role -> its service account, as IAM spells a member."
  value       = { for role, account in google_service_account.role : role => account.member }
}
