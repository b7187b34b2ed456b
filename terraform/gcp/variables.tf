variable "project" {
  description = "Id of the project of all resources."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.project))
    error_message = "project must be a project id: 6 to 30 lower-case letters, digits or dashes, beginning with a letter."
  }
}

variable "region" {
  description = "Region of the network, the placement policies and the bucket."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+$", var.region))
    error_message = "region must be the name of a region, such as us-central1."
  }
}

variable "zone" {
  description = "Zone of all hosts, in the region."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+-[a-z]$", var.zone))
    error_message = "zone must be the name of a zone, such as us-central1-a."
  }
}

variable "cluster" {
  description = "Name of the cluster, a part of the names of its resources except hosts."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,19}$", var.cluster))
    error_message = "cluster must be a lower-case letter, then at most 19 lower-case letters, digits or dashes."
  }
}

variable "cluster_id" {
  description = "Six hex digits that distinguish this cluster from others of the same name."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[0-9a-f]{6}$", var.cluster_id))
    error_message = "cluster_id must be six hex digits."
  }
}

variable "labels" {
  description = "Labels of all resources that support labels. clusterctl-cluster and clusterctl-id are always added."
  type        = map(string)
  default     = {}
  nullable    = false

  validation {
    condition = alltrue([
      for key, value in var.labels :
      can(regex("^[a-z][a-z0-9_-]{0,62}$", key)) && can(regex("^[a-z0-9_-]{0,63}$", value))
    ])
    error_message = "labels must consist of lower-case letters, digits, dashes and underscores, and a key must begin with a letter."
  }
}

variable "admin_user" {
  description = "Account on every host for SSH logins, with the right to become root."
  type        = string
  default     = "clusterctl"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z_][a-z0-9_-]{0,30}$", var.admin_user)) && var.admin_user != "root"
    error_message = "admin_user must be the name of an account other than root."
  }
}

variable "admin_public_key" {
  description = "Public SSH key of the admin user, a line of a .pub file."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp256) [A-Za-z0-9+/=]+( [^\n]*)?$", var.admin_public_key))
    error_message = "admin_public_key must be a line of a .pub file, never a private key."
  }
}

variable "enable_apis" {
  description = "Whether to enable the services. They stay enabled when the cluster is destroyed."
  type        = bool
  default     = true
  nullable    = false
}

variable "services" {
  description = "Google APIs that the cluster needs."
  type        = list(string)
  default     = ["compute.googleapis.com", "iam.googleapis.com", "iap.googleapis.com"]
  nullable    = false

  validation {
    condition     = alltrue([for service in var.services : endswith(service, ".googleapis.com")])
    error_message = "services must be names of Google APIs, such as compute.googleapis.com."
  }
}

variable "network" {
  description = <<-EOT
    Address range of a new subnetwork, or the names of an existing network and subnetwork. host_project is the host
    project of a Shared VPC that has them. Default is the project. firewall is whether to create firewall rules for the
    hosts, in the network's project.
  EOT
  type = object({
    cidr         = optional(string, "10.80.0.0/20")
    network      = optional(string)
    subnetwork   = optional(string)
    host_project = optional(string)
    firewall     = optional(bool, true)
  })
  default  = {}
  nullable = false

  validation {
    condition     = can(cidrnetmask(var.network.cidr))
    error_message = "network.cidr must be a range of IPv4 addresses, such as 10.80.0.0/20."
  }

  validation {
    condition     = (var.network.network == null) == (var.network.subnetwork == null)
    error_message = "network.network and network.subnetwork must be set together, or both be omitted for a new network."
  }

  validation {
    condition     = var.network.network != null || (var.network.host_project == null && var.network.firewall)
    error_message = "network.host_project and network.firewall = false are for an existing network."
  }
}

variable "kms_key" {
  description = "Key that encrypts disks, Filestore and bucket (CMEK). Default is Google's own key."
  type        = string
  default     = null

  validation {
    condition     = var.kms_key == null || can(regex("^projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+$", var.kms_key))
    error_message = "kms_key must be projects/PROJECT/locations/REGION/keyRings/RING/cryptoKeys/KEY."
  }
}

variable "secure_boot" {
  description = "Whether to boot only signed software. NVIDIA's drivers often are not signed."
  type        = bool
  default     = false
  nullable    = false
}

variable "auto_down" {
  description = "Whether the controller may delete and stop the cluster's hosts, so that an idle cluster takes itself down."
  type        = bool
  default     = false
  nullable    = false
}

variable "hosts" {
  description = <<-EOT
    Hostname -> host. Exactly one host has the role "controller". All other hosts are "compute", with a partition.
    guest_accelerator is for N1 machines only, because other families include their GPUs. placement is one of placements.
    flex_start is the time in seconds after which Google deletes a flex-start instance. Default is no such instance.
    reservation is NAME or projects/PROJECT/reservations/NAME, each optionally with /reservationBlocks/BLOCK.
    reservation_bound is for machine types with reservations that need this provisioning model, such as A3 Ultra and A4.
    boot_image is the image of new hosts. Default is image. A change of boot_image does not replace hosts.
    Hosts of a partition have the same image, local_ssds, machine_type and placement.
  EOT
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
    local_ssds = optional(number, 0)
    guest_accelerator = optional(object({
      type  = string
      count = number
    }))
    has_gpu            = optional(bool, false)
    spot               = optional(bool, false)
    flex_start         = optional(number)
    termination_action = optional(string, "STOP")
    placement          = optional(string)
    nic_type           = optional(string, "GVNIC")
    tier_1             = optional(bool, false)
    reservation        = optional(string)
    reservation_bound  = optional(bool, false)
  }))
  nullable = false

  validation {
    condition     = alltrue([for name, _ in var.hosts : can(regex("^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$", name))])
    error_message = "A hostname must have at most 63 lower-case letters, digits or dashes and begin with a letter."
  }

  validation {
    condition     = length([for host in var.hosts : host if host.role == "controller"]) == 1
    error_message = "Exactly one host must have the role \"controller\"."
  }

  validation {
    condition = alltrue([
      for host in var.hosts :
      host.role == "controller" ? host.partition == null : host.role == "compute" && host.partition != null
    ])
    error_message = "A host must have the role \"controller\" without a partition, or \"compute\" with a partition."
  }

  validation {
    condition     = alltrue([for host in var.hosts : (host.image.family == null) != (host.image.name == null)])
    error_message = "An image must have either a family or a name."
  }

  validation {
    condition     = alltrue([for host in var.hosts : contains(["STOP", "DELETE"], host.termination_action)])
    error_message = "termination_action must be STOP or DELETE."
  }

  validation {
    condition = alltrue([
      for host in var.hosts : try(host.flex_start >= 600 && host.flex_start <= 604800, host.flex_start == null)
    ])
    error_message = "flex_start must be 600 to 604800 seconds."
  }

  validation {
    condition = alltrue([
      for host in var.hosts : host.flex_start == null || (host.role == "compute" && !host.spot && host.reservation == null)
    ])
    error_message = "flex_start is for compute hosts without spot and reservation."
  }

  validation {
    condition     = alltrue([for host in var.hosts : contains(["GVNIC", "VIRTIO_NET"], host.nic_type)])
    error_message = "nic_type must be GVNIC or VIRTIO_NET."
  }

  validation {
    condition     = alltrue([for host in var.hosts : host.guest_accelerator == null || startswith(host.machine_type, "n1-")])
    error_message = "guest_accelerator is for N1 machines only, because other families include their GPUs."
  }
}

variable "placements" {
  description = "Names of the compact placement policies, which place hosts close to each other."
  type        = set(string)
  default     = []
  nullable    = false
}

variable "filestore" {
  description = "The shared folder on Filestore. Default is a folder of the controller."
  type = object({
    tier         = string
    capacity_gib = number
  })
  default = null

  validation {
    condition     = var.filestore == null || contains(["BASIC_HDD", "BASIC_SSD", "ZONAL", "REGIONAL"], try(var.filestore.tier, ""))
    error_message = "filestore.tier must be BASIC_HDD, BASIC_SSD, ZONAL or REGIONAL."
  }
}

variable "storage" {
  description = <<-EOT
    An existing shared folder that outlives the cluster: the path of a disk for the controller, or a Filestore instance,
    with the range of addresses from which it calls the hosts. terraform/gcp-storage creates one.
  EOT
  type = object({
    name = string
    disk = optional(string)
    filestore = optional(object({
      server = string
      path   = string
      range  = string
    }))
  })
  default = null

  validation {
    condition     = var.storage == null || (try(var.storage.disk, null) == null) != (try(var.storage.filestore, null) == null)
    error_message = "storage must have either a disk or a filestore."
  }
}

variable "bucket" {
  description = "A bucket that the hosts may read and write, existing or created with the cluster."
  type = object({
    name   = string
    create = optional(bool, false)
  })
  default = null
}
