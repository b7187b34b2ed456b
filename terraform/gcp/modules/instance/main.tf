# Hosts of one kind, and the right to delete or stop them.

locals {
  images = {
    for name, host in var.hosts : name => join("/", compact([
      "projects/${host.image.project}/global/images",
      host.image.family == null ? null : "family",
      coalesce(host.image.family, host.image.name),
    ]))
  }

  provisioning_models = {
    for name, host in var.hosts : name => (
      host.spot ? "SPOT" :
      host.flex_start != null ? "FLEX_START" :
      host.reservation_bound ? "RESERVATION_BOUND" :
      "STANDARD"
    )
  }
  passing = { for name, model in local.provisioning_models : name => contains(["SPOT", "FLEX_START"], model) }
  termination_actions = {
    STANDARD   = null
    FLEX_START = "DELETE"
  }

  # Flex-start machines can't use reservations, and must say so.
  reservation_types = {
    for name, host in var.hosts : name => (
      host.reservation != null ? "SPECIFIC_RESERVATION" : host.flex_start != null ? "NO_RESERVATION" : null
    )
  }
}

# What Terraform's provider does not replace a host for, but Google needs or the instance ignores. The hosts have it in
# common. The image counts as requested: a newer image of the family does not replace hosts.
resource "terraform_data" "shape" {
  input = var.stop_to_change ? null : {
    image        = one(distinct(values(local.images)))
    local_ssds   = one(distinct([for host in var.hosts : host.local_ssds]))
    machine_type = one(distinct([for host in var.hosts : host.machine_type]))
    placement    = one(distinct([for host in var.hosts : host.placement]))
    secure_boot  = var.common.secure_boot
  }
}

resource "google_compute_instance" "host" {
  for_each = var.hosts

  project           = var.common.project
  zone              = var.common.zone
  name              = each.key
  machine_type      = each.value.machine_type
  labels            = var.common.labels
  can_ip_forward    = false
  resource_policies = each.value.placement == null ? [] : [var.placement_policies[each.value.placement]]
  # A host that was stopped, or preempted by Google, is started again.
  desired_status            = "RUNNING"
  allow_stopping_for_update = var.stop_to_change

  metadata = {
    block-project-ssh-keys = "TRUE"
    # The host publishes its SSH host keys as guest attributes.
    enable-guest-attributes = "TRUE"
    enable-oslogin          = "FALSE"
    serial-port-enable      = "FALSE"
    ssh-keys                = var.common.ssh_keys
  }

  boot_disk {
    auto_delete       = true
    kms_key_self_link = var.common.kms_key

    initialize_params {
      image  = coalesce(each.value.boot_image, local.images[each.key])
      size   = each.value.boot_disk.size_gib
      type   = each.value.boot_disk.type
      labels = var.common.labels
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
    for_each = range(each.value.local_ssds)

    content {
      interface = "NVME"
    }
  }

  network_interface {
    subnetwork = var.common.subnetwork
    nic_type   = each.value.nic_type
  }

  dynamic "network_performance_config" {
    for_each = each.value.tier_1 ? ["TIER_1"] : []

    content {
      total_egress_bandwidth_tier = network_performance_config.value
    }
  }

  dynamic "guest_accelerator" {
    for_each = each.value.guest_accelerator == null ? [] : [each.value.guest_accelerator]

    content {
      type  = guest_accelerator.value.type
      count = guest_accelerator.value.count
    }
  }

  scheduling {
    # Google can't migrate hosts with GPUs or compact placement, and can't restart spot and flex-start machines.
    on_host_maintenance = each.value.has_gpu || each.value.placement != null || local.passing[each.key] ? "TERMINATE" : "MIGRATE"
    automatic_restart   = each.value.placement == null && !local.passing[each.key]
    preemptible         = each.value.spot
    provisioning_model  = local.provisioning_models[each.key]
    instance_termination_action = lookup(
      local.termination_actions, local.provisioning_models[each.key], each.value.termination_action
    )

    dynamic "max_run_duration" {
      for_each = each.value.flex_start == null ? [] : [each.value.flex_start]

      content {
        seconds = max_run_duration.value
      }
    }
  }

  dynamic "reservation_affinity" {
    for_each = local.reservation_types[each.key] == null ? [] : [local.reservation_types[each.key]]

    content {
      type = reservation_affinity.value

      dynamic "specific_reservation" {
        for_each = each.value.reservation == null ? [] : [each.value.reservation]

        content {
          key    = "compute.googleapis.com/reservation-name"
          values = [specific_reservation.value]
        }
      }
    }
  }

  service_account {
    email = var.service_account
    # IAM alone restricts the account.
    scopes = ["cloud-platform"]
  }

  shielded_instance_config {
    enable_secure_boot          = var.common.secure_boot
    enable_vtpm                 = true
    enable_integrity_monitoring = true
  }

  lifecycle {
    # The image of a family and the labels of a boot disk are those of its creation. Some machine types include local
    # SSDs.
    ignore_changes = [
      boot_disk[0].initialize_params[0].image,
      boot_disk[0].initialize_params[0].labels,
      scratch_disk,
    ]
    replace_triggered_by = [terraform_data.shape]
  }
}

# Google's smallest role that can delete and stop hosts, for this host only. The grant is deleted with the host.
resource "google_compute_instance_iam_member" "manager" {
  for_each = var.manageable ? var.hosts : {}

  project       = var.common.project
  zone          = var.common.zone
  instance_name = google_compute_instance.host[each.key].name
  role          = "roles/compute.instanceAdmin.v1"
  member        = var.common.manager

  lifecycle {
    replace_triggered_by = [google_compute_instance.host[each.key].instance_id]
  }
}
