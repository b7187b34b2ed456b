variable "project" {
  description = "Id of the project."
  type        = string
}

variable "region" {
  description = "Region of the subnetwork."
  type        = string
}

variable "prefix" {
  description = "Prefix of the names of the resources."
  type        = string
}

variable "mark" {
  description = "Text in the description of resources without labels, by which teardown finds them."
  type        = string
}

variable "network" {
  description = "The variable network of the root module."
  type = object({
    cidr         = string
    network      = optional(string)
    subnetwork   = optional(string)
    host_project = optional(string)
    firewall     = bool
  })
}

variable "filestore_ranges" {
  description = "Address range of the Filestore instance. Empty without an instance."
  type        = list(string)
  default     = []
}

variable "service_accounts" {
  description = "Emails of the hosts' service accounts, by which the firewall identifies hosts."
  type        = list(string)
}
