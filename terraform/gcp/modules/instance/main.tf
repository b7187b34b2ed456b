# A host, its disks, and the right to delete or stop it.

locals {
  image = join("/", compact([
    "projects/${var.host.image.project}/global/images",
    var.host.image.family == null ? null : "family",
    coalesce(var.host.image.family, var.host.image.name),
  ]))

  # Google can't migrate hosts with GPUs or compact placement, and can't restart spot and flex-start machines.
  passing    = var.host.spot || var.host.flex_start != null
  fixed      = var.host.has_gpu || local.passing || var.host.placement != null
  restarting = !local.passing && var.host.placement == null

  provisioning_model = (
    var.host.spot ? "SPOT" :
    var.host.flex_start != null ? "FLEX_START" :
    var.host.reservation_bound ? "RESERVATION_BOUND" :
    "STANDARD"
  )
  termination_actions = {
    STANDARD   = null
    FLEX_START = "DELETE"
  }

  # Flex-start machines can't use reservations, and must say so.
  reservation_type = (
    var.host.reservation != null ? "SPECIFIC_RESERVATION" : var.host.flex_start != null ? "NO_RESERVATION" : null
  )

  # The name of a disk contains the properties that make it another disk, shortened to the limit of 63 characters.
  extra_disks = {
    for index, disk in var.host.extra_disks : tostring(index) => merge(disk, {
      name = "${var.name}-x${index}-${substr(sha1(join(" ", compact([disk.type, var.common.kms_key]))), 0, 6)}"
    })
  }
}

# Changes that replace a host. The image counts as requested: a newer image of the family does not replace hosts.
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

# The same, of settings that google_compute_instance.host ignores.
resource "terraform_data" "options" {
  input = {
    flex_start = var.host.flex_start
    tier_1     = var.host.tier_1
  }
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

  lifecycle {
    # A replacement has another name, so that the old disk is deleted after it is detached from the host.
    create_before_destroy = true
    # See google_compute_instance.host.
    ignore_changes = [
      architecture,
      async_primary_disk,
      description,
      image,
      params,
      snapshot,
      source_disk,
      source_image_encryption_key,
      source_instant_snapshot,
      source_snapshot_encryption_key,
      source_storage_object,
      storage_pool,
    ]
  }
}

resource "google_compute_instance" "host" {
  project           = var.common.project
  zone              = var.common.zone
  name              = var.name
  machine_type      = var.host.machine_type
  labels            = var.common.labels
  can_ip_forward    = false
  resource_policies = var.placement_policy == null ? [] : [var.placement_policy]
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
    instance_termination_action = lookup(local.termination_actions, local.provisioning_model, var.host.termination_action)

    dynamic "max_run_duration" {
      for_each = var.host.flex_start == null ? [] : [var.host.flex_start]

      content {
        seconds = max_run_duration.value
      }
    }
  }

  dynamic "reservation_affinity" {
    for_each = local.reservation_type == null ? [] : [local.reservation_type]

    content {
      type = reservation_affinity.value

      dynamic "specific_reservation" {
        for_each = var.host.reservation == null ? [] : [var.host.reservation]

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
    # The image of a family and the labels of a boot disk are those of its creation. Some machine types
    # include local SSDs.
    #
    # A change of the others forces a replacement, and the provider does not call them computed: if Google filled one in,
    # such as the end of a flex-start machine, every plan would replace the hosts. tests/support/google/provider/google.toml
    # lists all of them with their lines in the provider's code. terraform_data.options has those that a spec sets.
    ignore_changes = [
      boot_disk[0].initialize_params[0].image,
      boot_disk[0].initialize_params[0].labels,
      scratch_disk,
      advanced_machine_features,
      boot_disk[0].disk_encryption_key_raw,
      boot_disk[0].disk_encryption_key_rsa,
      boot_disk[0].disk_encryption_service_account,
      boot_disk[0].initialize_params[0].enable_confidential_compute,
      boot_disk[0].initialize_params[0].replica_zones,
      boot_disk[0].initialize_params[0].resource_manager_tags,
      boot_disk[0].initialize_params[0].source_image_encryption_key,
      boot_disk[0].initialize_params[0].source_snapshot_encryption_key,
      boot_disk[0].initialize_params[0].storage_pool,
      hostname,
      instance_encryption_key,
      key_revocation_action_type,
      network_interface[0].queue_count,
      network_interface[0].vlan,
      network_performance_config,
      params,
      scheduling[0].local_ssd_recovery_timeout,
      scheduling[0].max_run_duration,
      scheduling[0].on_instance_stop_action,
      scheduling[0].preemption_notice_duration,
      scheduling[0].termination_time,
      workload_identity_config,
    ]
    replace_triggered_by = [terraform_data.shape, terraform_data.options]
  }
}

# Google's smallest role that can delete and stop hosts, for this host only. The grant is deleted with the host.
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
