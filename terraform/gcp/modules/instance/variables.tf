variable "name" {
  description = "The hostname."
  type        = string
}

variable "host" {
  description = "What the host is: see hosts of the root module."
  type = object({
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
    extra_disks = list(object({
      size_gib = number
      type     = string
    }))
    local_ssds = number
    guest_accelerator = optional(object({
      type  = string
      count = number
    }))
    has_gpu            = bool
    spot               = bool
    termination_action = string
    placement          = optional(string)
    nic_type           = string
    tier_1             = bool
    reservation        = optional(string)
    reservation_bound  = bool
  })
}

variable "common" {
  description = "What all hosts have in common. manager is who may delete or stop them, null for nobody."
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
  description = "Email of the account that the host acts as."
  type        = string
}

variable "placement_policy" {
  description = "Id of the placement policy that the host is in; null for none."
  type        = string
  default     = null
}

variable "manageable" {
  description = "Whether common.manager is somebody, which is known before who it is."
  type        = bool
  default     = false
}

variable "stop_to_change" {
  description = "Stop the host and change it in place, where it can't be changed while it runs; else it is replaced."
  type        = bool
}

variable "shared_disks" {
  description = "Ids of the disks of the shared folder that outlives the cluster: one, or none."
  type        = list(string)
  default     = []
}
