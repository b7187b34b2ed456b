variable "project" {
  description = "Id of the project."
  type        = string
}

variable "name" {
  description = "Name of the instance."
  type        = string
}

variable "location" {
  description = "Its zone, or its region if it is regional."
  type        = string
}

variable "settings" {
  description = "Its tier and its size."
  type = object({
    tier         = string
    capacity_gib = number
  })
}

variable "network" {
  description = "Id of the network that it is reached on."
  type        = string
}

variable "cidr" {
  description = "Addresses that may mount it; null for all of the network."
  type        = string
  default     = null
}

variable "kms_key" {
  description = "Key that it is encrypted with; null for Google's own."
  type        = string
  default     = null
}

variable "labels" {
  description = "Labels of the instance."
  type        = map(string)
}
