variable "project" {
  description = "Id of the project."
  type        = string
}

variable "region" {
  description = "Region of a Filestore instance that is regional."
  type        = string
}

variable "zone" {
  description = "Zone of all else."
  type        = string
}

variable "name" {
  description = "Its name, which outlives the cluster's id."
  type        = string
}

variable "disk" {
  description = "The disk's size and type; null where it is a Filestore instance."
  type = object({
    size_gib = number
    type     = string
  })
  default = null
}

variable "filestore" {
  description = "The Filestore instance's tier and size; null where it is a disk."
  type = object({
    tier         = string
    capacity_gib = number
  })
  default = null
}

variable "network" {
  description = "Id of the network that a Filestore instance is reached on."
  type        = string
}

variable "cidr" {
  description = "Addresses that may mount a Filestore instance; null for all of the network."
  type        = string
  default     = null
}

variable "kms_key" {
  description = "Key that it is encrypted with; null for Google's own."
  type        = string
  default     = null
}

variable "labels" {
  description = "Its labels."
  type        = map(string)
}
