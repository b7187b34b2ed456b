# The hosts of a Slurm cluster on Google Cloud. var.hosts defines every property of the hosts.

locals {
  prefix = "${var.cluster}-${var.cluster_id}"

  # Teardown finds remaining resources by these labels, even if the state is lost.
  labels = merge(var.labels, {
    clusterctl-cluster = var.cluster
    clusterctl-id      = var.cluster_id
    }, var.storage == null ? {} : {
    # `storage remove` finds the hosts that use a storage by this label.
    clusterctl-uses-storage = var.storage.name
  })

  # The same in the description of resources without labels. The name alone could be another cluster's.
  mark = "clusterctl-cluster=${var.cluster} clusterctl-id=${var.cluster_id}"

  # Filestore peers directly only with a network of its own project (cloud.google.com/filestore/docs/architecture). For a
  # Shared VPC, the host project must have private services access.
  connect_mode = coalesce(var.network.host_project, var.project) == var.project ? "DIRECT_PEERING" : "PRIVATE_SERVICE_ACCESS"

  # Not `compact`, with which the number of ranges would be unknown before a Filestore instance exists.
  storage_ranges = [for range in [try(var.storage.filestore.range, null)] : range if range != null]

  controller = one([for name, host in var.hosts : merge(host, { name = name }) if host.role == "controller"])
  compute    = { for name, host in var.hosts : name => host if host.role == "compute" }

  # Common properties of all hosts.
  common = {
    project     = var.project
    zone        = var.zone
    labels      = local.labels
    subnetwork  = module.network.subnetwork
    kms_key     = var.kms_key
    secure_boot = var.secure_boot
    manager     = var.auto_down ? module.iam.members.controller : null
    ssh_keys    = "${var.admin_user}:${var.admin_public_key}"
  }
}

resource "google_project_service" "needed" {
  for_each = var.enable_apis ? toset(var.services) : toset([])

  project = var.project
  service = each.value
  # Other users of the project may need the service.
  disable_on_destroy = false
}

module "iam" {
  source     = "./modules/iam"
  depends_on = [google_project_service.needed]

  project = var.project
  prefix  = local.prefix
  mark    = local.mark
}

module "network" {
  source     = "./modules/network"
  depends_on = [google_project_service.needed]

  project          = var.project
  region           = var.region
  prefix           = local.prefix
  mark             = local.mark
  network          = var.network
  service_accounts = values(module.iam.emails)
  filestore_ranges = concat(module.filestore[*].range, local.storage_ranges)
}

module "controller" {
  source = "./modules/controller"

  host            = local.controller
  common          = local.common
  service_account = module.iam.emails.controller
  manageable      = var.auto_down
  shared_disks    = compact([try(var.storage.disk, null)])
}

module "nodes" {
  source = "./modules/nodes"

  project         = var.project
  region          = var.region
  hosts           = local.compute
  placements      = var.placements
  mark            = local.mark
  common          = local.common
  service_account = module.iam.emails.compute
  manageable      = var.auto_down
}

module "filestore" {
  source     = "./modules/filestore"
  count      = var.filestore == null ? 0 : 1
  depends_on = [google_project_service.needed]

  project  = var.project
  name     = "${local.prefix}-shared"
  location = var.filestore.tier == "REGIONAL" ? var.region : var.zone
  settings = var.filestore
  network  = module.network.network

  connect_mode = local.connect_mode
  cidr         = module.network.cidr
  kms_key      = var.kms_key
  labels       = local.labels
}

module "bucket" {
  source     = "./modules/bucket"
  count      = var.bucket == null ? 0 : 1
  depends_on = [google_project_service.needed]

  project = var.project
  region  = var.region
  bucket  = var.bucket
  members = module.iam.members
  kms_key = var.kms_key
  labels  = local.labels
}
