variable "project" {
  description = "Id of the project."
  type        = string
}

variable "region" {
  description = "Region of a regional Filestore instance."
  type        = string
}

variable "zone" {
  description = "Zone of other storage."
  type        = string
}

variable "name" {
  description = "Name of the storage."
  type        = string
}

variable "disk" {
  description = "Size and type of the disk. Null for a Filestore instance."
  type = object({
    size_gib = number
    type     = string
  })
  default = null
}

variable "filestore" {
  description = "Tier and size of the Filestore instance. Null for a disk."
  type = object({
    tier         = string
    capacity_gib = number
  })
  default = null
}

variable "network" {
  description = "Id of the network of a Filestore instance. Null for a disk."
  type        = string
  default     = null
}

variable "kms_key" {
  description = "Key that encrypts the storage. Null for Google's own key."
  type        = string
  default     = null
}

variable "labels" {
  description = "Labels of the storage."
  type        = map(string)
}

variable "connect_mode" {
  description = "How a Filestore instance is connected to the network, in Google's words."
  type        = string
  default     = "DIRECT_PEERING"
}

variable "enable_apis" {
  description = "Whether to enable the services that are not enabled."
  type        = bool
  default     = false
}

variable "services" {
  description = "Google APIs that the storage needs."
  type        = list(string)
  default     = []
}
