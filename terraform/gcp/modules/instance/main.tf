# One host, its disks, and who may take it down.

locals {
  image = join("/", compact([
    "projects/${var.host.image.project}/global/images",
    var.host.image.family == null ? null : "family",
    coalesce(var.host.image.family, var.host.image.name),
  ]))

  # Google can neither migrate GPUs and close neighbours nor restart what it sells as spot.
  fixed      = var.host.has_gpu || var.host.spot || var.host.placement != null
  restarting = !var.host.spot && var.host.placement == null

  provisioning_model = var.host.spot ? "SPOT" : var.host.reservation_bound ? "RESERVATION_BOUND" : "STANDARD"

  # What makes a disk another one is in its name, in few letters: 63 are allowed.
  extra_disks = {
    for index, disk in var.host.extra_disks : tostring(index) => merge(disk, {
      name = "${var.name}-x${index}-${substr(sha1(join(" ", compact([disk.type, var.common.kms_key]))), 0, 6)}"
    })
  }
}

# What a host is made anew for. The image counts as it is asked for: a newer one of a family replaces no host.
resource "terraform_data" "shape" {
  input = merge(
    {
      image      = local.image
      local_ssds = var.host.local_ssds
    },
    var.stop_to_change ? {} : {
      machine_type    = var.host.machine_type
      placement       = var.host.placement
      secure_boot     = var.common.secure_boot
      service_account = var.service_account
      subnetwork      = var.common.subnetwork
    },
  )
}

resource "google_compute_disk" "extra" {
  for_each = local.extra_disks

  project = var.common.project
  zone    = var.common.zone
  name    = each.value.name
  type    = each.value.type
  size    = each.value.size_gib
  labels  = var.common.labels

  dynamic "disk_encryption_key" {
    for_each = var.common.kms_key == null ? [] : [var.common.kms_key]

    content {
      kms_key_self_link = disk_encryption_key.value
    }
  }

  # Another disk in its place has another name, and the old one goes when the host no longer has it.
  lifecycle {
    create_before_destroy = true
  }
}

resource "google_compute_instance" "host" {
  project                   = var.common.project
  zone                      = var.common.zone
  name                      = var.name
  machine_type              = var.host.machine_type
  labels                    = var.common.labels
  can_ip_forward            = false
  resource_policies         = var.placement_policy == null ? [] : [var.placement_policy]
  desired_status            = "RUNNING" # one that was stopped, or taken away by Google, is started again
  allow_stopping_for_update = var.stop_to_change

  metadata = {
    block-project-ssh-keys  = "TRUE"
    enable-guest-attributes = "TRUE" # the host publishes its SSH host keys there
    enable-oslogin          = "FALSE"
    serial-port-enable      = "FALSE"
    ssh-keys                = var.common.ssh_keys
  }

  boot_disk {
    auto_delete       = true
    kms_key_self_link = var.common.kms_key

    initialize_params {
      image  = coalesce(var.host.boot_image, local.image)
      size   = var.host.boot_disk.size_gib
      type   = var.host.boot_disk.type
      labels = var.common.labels
    }
  }

  dynamic "attached_disk" {
    for_each = google_compute_disk.extra

    content {
      source            = attached_disk.value.id
      device_name       = "extra-${attached_disk.key}"
      kms_key_self_link = var.common.kms_key
    }
  }

  dynamic "attached_disk" {
    for_each = var.shared_disks

    content {
      source            = attached_disk.value
      device_name       = "shared"
      kms_key_self_link = var.common.kms_key
    }
  }

  dynamic "scratch_disk" {
    for_each = range(var.host.local_ssds)

    content {
      interface = "NVME"
    }
  }

  network_interface {
    subnetwork = var.common.subnetwork
    nic_type   = var.host.nic_type
  }

  dynamic "network_performance_config" {
    for_each = var.host.tier_1 ? ["TIER_1"] : []

    content {
      total_egress_bandwidth_tier = network_performance_config.value
    }
  }

  dynamic "guest_accelerator" {
    for_each = var.host.guest_accelerator == null ? [] : [var.host.guest_accelerator]

    content {
      type  = guest_accelerator.value.type
      count = guest_accelerator.value.count
    }
  }

  scheduling {
    on_host_maintenance         = local.fixed ? "TERMINATE" : "MIGRATE"
    automatic_restart           = local.restarting
    preemptible                 = var.host.spot
    provisioning_model          = local.provisioning_model
    instance_termination_action = local.provisioning_model == "STANDARD" ? null : var.host.termination_action
  }

  dynamic "reservation_affinity" {
    for_each = var.host.reservation == null ? [] : [var.host.reservation]

    content {
      type = "SPECIFIC_RESERVATION"

      specific_reservation {
        key    = "compute.googleapis.com/reservation-name"
        values = [reservation_affinity.value]
      }
    }
  }

  service_account {
    email  = var.service_account
    scopes = ["cloud-platform"] # what it may do is a matter of IAM
  }

  shielded_instance_config {
    enable_secure_boot          = var.common.secure_boot
    enable_vtpm                 = true
    enable_integrity_monitoring = true
  }

  lifecycle {
    # Which image a family stood for, and a boot disk's labels, are of the day it was made. Some machine types
    # bring local SSDs by themselves.
    ignore_changes = [
      boot_disk[0].initialize_params[0].image,
      boot_disk[0].initialize_params[0].labels,
      scratch_disk,
    ]
    replace_triggered_by = [terraform_data.shape]
  }
}

# The least of Google's own roles that can delete and stop, on this host alone. A host's grants go with it.
resource "google_compute_instance_iam_member" "manager" {
  count = var.manageable ? 1 : 0

  project       = var.common.project
  zone          = var.common.zone
  instance_name = google_compute_instance.host.name
  role          = "roles/compute.instanceAdmin.v1"
  member        = var.common.manager

  lifecycle {
    replace_triggered_by = [google_compute_instance.host.instance_id]
  }
}
