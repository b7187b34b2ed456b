# A network that is reachable only by SSH through IAP's tunnel, with internet access through NAT. Hosts have no public
# addresses. On an existing network, at most firewall rules for the cluster's hosts are created, and internet access is
# up to that network.

locals {
  new = var.network.network == null
  # The rules of a Shared VPC are in its host project, as its network is.
  project = coalesce(var.network.host_project, var.project)

  network = (
    local.new
    ? google_compute_network.cluster[0].id
    : "projects/${local.project}/global/networks/${var.network.network}"
  )
  subnetwork = (
    local.new
    ? google_compute_subnetwork.cluster[0].id
    : "projects/${local.project}/regions/${var.region}/subnetworks/${var.network.subnetwork}"
  )

  # Source addresses of the tunnels of Identity-Aware Proxy.
  iap = "35.235.240.0/20"
}

resource "google_compute_network" "cluster" {
  count = local.new ? 1 : 0

  project                 = var.project
  name                    = "${var.prefix}-network"
  description             = var.mark
  auto_create_subnetworks = false
  routing_mode            = "REGIONAL"
  # The largest MTU, so that gradients need fewer packets.
  mtu = 8896
}

resource "google_compute_subnetwork" "cluster" {
  #checkov:skip=CKV_GCP_26: flow logs are billed by traffic, and training sends terabytes between nodes that trust each other
  count = local.new ? 1 : 0

  project                  = var.project
  region                   = var.region
  name                     = "${var.prefix}-subnetwork"
  description              = var.mark
  network                  = google_compute_network.cluster[0].id
  ip_cidr_range            = var.network.cidr
  stack_type               = "IPV4_ONLY"
  private_ip_google_access = true
}

resource "google_compute_router" "out" {
  count = local.new ? 1 : 0

  project = var.project
  region  = var.region
  name    = "${var.prefix}-router"
  network = google_compute_network.cluster[0].id

  description = var.mark
}

resource "google_compute_router_nat" "out" {
  count = local.new ? 1 : 0

  project                            = var.project
  region                             = var.region
  name                               = "${var.prefix}-nat"
  router                             = google_compute_router.out[0].name
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "LIST_OF_SUBNETWORKS"

  # A host gets more ports while its programs have many connections to one address, such as loaders of data from a
  # bucket. Without free ports, new connections hang. Google does not combine this with endpoint-independent mapping.
  enable_dynamic_port_allocation      = true
  enable_endpoint_independent_mapping = false
  min_ports_per_vm                    = 64
  max_ports_per_vm                    = 4096

  subnetwork {
    name                    = google_compute_subnetwork.cluster[0].id
    source_ip_ranges_to_nat = ["ALL_IP_RANGES"]
  }

  log_config {
    enable = true
    filter = "ERRORS_ONLY"
  }
}

resource "google_compute_firewall" "iap_ssh" {
  count = var.network.firewall ? 1 : 0

  project                 = local.project
  name                    = "${var.prefix}-iap-ssh"
  description             = "SSH through Identity-Aware Proxy, and from nowhere else. ${var.mark}"
  network                 = local.network
  direction               = "INGRESS"
  priority                = 1000
  source_ranges           = [local.iap]
  target_service_accounts = var.service_accounts

  allow {
    protocol = "tcp"
    ports    = ["22"]
  }
}

resource "google_compute_firewall" "internal" {
  count = var.network.firewall ? 1 : 0

  project                 = local.project
  name                    = "${var.prefix}-internal"
  description             = "The cluster's hosts among themselves: Slurm, MPI, NCCL and NFS choose their ports. ${var.mark}"
  network                 = local.network
  direction               = "INGRESS"
  priority                = 1000
  source_service_accounts = var.service_accounts
  target_service_accounts = var.service_accounts

  allow {
    protocol = "all"
  }
}

# NFSv3's locks need calls back to portmapper, statd and lockd of the host, with varying ports. Filestore has NFS 4.1
# only in its higher tiers, and with Kerberos.
resource "google_compute_firewall" "filestore" {
  count = var.network.firewall ? length(var.filestore_ranges) : 0

  project                 = local.project
  name                    = "${var.prefix}-filestore"
  description             = "The Filestore instance calls back for locks of NFSv3. ${var.mark}"
  network                 = local.network
  direction               = "INGRESS"
  priority                = 1000
  source_ranges           = [var.filestore_ranges[count.index]]
  target_service_accounts = var.service_accounts

  allow {
    protocol = "tcp"
  }

  allow {
    protocol = "udp"
  }
}

# An existing network may allow more traffic than a new network, but not to these hosts.
resource "google_compute_firewall" "deny" {
  count = var.network.firewall ? 1 : 0

  project                 = local.project
  name                    = "${var.prefix}-deny"
  description             = "Nothing else gets to the cluster's hosts. ${var.mark}"
  network                 = local.network
  direction               = "INGRESS"
  priority                = 2000
  source_ranges           = ["0.0.0.0/0"]
  target_service_accounts = var.service_accounts

  deny {
    protocol = "all"
  }
}
