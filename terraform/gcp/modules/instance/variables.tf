variable "hosts" {
  description = "Hostname -> properties of the host, as in hosts of the root module."
  type = map(object({
    role         = string
    partition    = optional(string)
    machine_type = string
    image = object({
      project = string
      family  = optional(string)
      name    = optional(string)
    })
    boot_image = optional(string)
    boot_disk = object({
      size_gib = number
      type     = string
    })
    local_ssds = number
    guest_accelerator = optional(object({
      type  = string
      count = number
    }))
    has_gpu            = bool
    spot               = bool
    flex_start         = optional(number)
    termination_action = string
    placement          = optional(string)
    nic_type           = string
    tier_1             = bool
    reservation        = optional(string)
    reservation_bound  = bool
  }))
}

variable "common" {
  description = "Common properties of all hosts. manager is the IAM member that may delete or stop them, or null."
  type = object({
    project     = string
    zone        = string
    labels      = map(string)
    subnetwork  = string
    kms_key     = optional(string)
    secure_boot = bool
    manager     = optional(string)
    ssh_keys    = string
  })
}

variable "service_account" {
  description = "Email of the hosts' service account."
  type        = string
}

variable "placement_policies" {
  description = "Name -> id of each placement policy that hosts name."
  type        = map(string)
  default     = {}
}

variable "manageable" {
  description = "Whether common.manager is set, which is known before its value."
  type        = bool
  default     = false
}

variable "stop_to_change" {
  description = "Whether to stop a host for changes that need that. Otherwise the host is replaced."
  type        = bool
}

variable "shared_disks" {
  description = "Id of the kept shared folder's disk. Empty without a disk."
  type        = list(string)
  default     = []
}
