variable "project" {
  description = "Id of the project."
  type        = string
}

variable "name" {
  description = "Name of the instance."
  type        = string
}

variable "location" {
  description = "Zone of the instance, or region of a regional instance."
  type        = string
}

variable "settings" {
  description = "Tier and size of the instance."
  type = object({
    tier         = string
    capacity_gib = number
  })
}

variable "network" {
  description = "Id of the network of the instance."
  type        = string
}

variable "cidr" {
  description = "Addresses that may mount the instance. Null for all addresses of the network."
  type        = string
  default     = null
}

variable "kms_key" {
  description = "Key that encrypts the storage. Null for Google's own key."
  type        = string
  default     = null
}

variable "labels" {
  description = "Labels of the instance."
  type        = map(string)
}

variable "connect_mode" {
  description = "How a Filestore instance is connected to the network, in Google's words."
  type        = string
}
