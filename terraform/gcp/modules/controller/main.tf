# The host with Slurm's daemons and, without Filestore, the shared folder. It is changed in place if possible, because a
# new host would have neither the users' files nor Slurm's records.

module "host" {
  source = "../instance"

  hosts           = { (var.host.name) = var.host }
  common          = var.common
  service_account = var.service_account
  manageable      = var.manageable
  stop_to_change  = true
  shared_disks    = var.shared_disks
}
