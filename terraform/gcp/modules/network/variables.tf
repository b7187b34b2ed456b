variable "project" {
  description = "Id of the project."
  type        = string
}

variable "region" {
  description = "Region of the subnetwork."
  type        = string
}

variable "prefix" {
  description = "First part of the names of what is made."
  type        = string
}

variable "mark" {
  description = "Words in the description of what can't carry labels, by which teardown finds it."
  type        = string
}

variable "network" {
  description = "Addresses of a new subnetwork; or the names of a network and a subnetwork that are there."
  type = object({
    cidr       = string
    network    = optional(string)
    subnetwork = optional(string)
  })
}

variable "filestore_ranges" {
  description = "Addresses of the Filestore instance: one range, or none."
  type        = list(string)
  default     = []
}

variable "service_accounts" {
  description = "Emails of the accounts that the cluster's hosts act as: the firewall knows hosts by them."
  type        = list(string)
}
