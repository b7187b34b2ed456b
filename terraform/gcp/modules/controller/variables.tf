variable "host" {
  description = "What the controller is, with its name; the instance module knows the type."
  type        = any
}

variable "common" {
  description = "What all hosts have in common; the instance module knows the type."
  type        = any
}

variable "service_account" {
  description = "Email of the account that the controller acts as."
  type        = string
}

variable "manageable" {
  description = "Whether the controller may stop itself."
  type        = bool
}

variable "shared_disks" {
  description = "Ids of the disks of the shared folder that outlives the cluster: one, or none."
  type        = list(string)
  default     = []
}
