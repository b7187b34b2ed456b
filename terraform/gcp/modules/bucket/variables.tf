variable "project" {
  description = "Id of the project."
  type        = string
}

variable "region" {
  description = "Region of a new bucket."
  type        = string
}

variable "bucket" {
  description = "Name of the bucket, and whether to create it."
  type = object({
    name   = string
    create = bool
  })
}

variable "members" {
  description = "Role -> IAM member that may read and write the bucket."
  type        = map(string)
}

variable "kms_key" {
  description = "Key that encrypts a new bucket. Null for Google's own key."
  type        = string
  default     = null
}

variable "labels" {
  description = "Labels of a new bucket."
  type        = map(string)
}
