variable "host" {
  description = "Properties of the controller, with its name. The module instance declares the type."
  type        = any
}

variable "common" {
  description = "Common properties of all hosts. The module instance declares the type."
  type        = any
}

variable "service_account" {
  description = "Email of the controller's service account."
  type        = string
}

variable "manageable" {
  description = "Whether the controller may stop itself."
  type        = bool
}

variable "shared_disks" {
  description = "Id of the kept shared folder's disk. Empty without a disk."
  type        = list(string)
  default     = []
}
