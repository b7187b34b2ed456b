variable "project" {
  description = "Id of the project."
  type        = string
}

variable "region" {
  description = "Region of a new bucket."
  type        = string
}

variable "bucket" {
  description = "Its name, and whether it is made here or there already."
  type = object({
    name   = string
    create = bool
  })
}

variable "members" {
  description = "Role -> who may read and write it, as IAM spells a member."
  type        = map(string)
}

variable "kms_key" {
  description = "Key that a new bucket is encrypted with; null for Google's own."
  type        = string
  default     = null
}

variable "labels" {
  description = "Labels of a new bucket."
  type        = map(string)
}
