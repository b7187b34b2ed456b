output "hosts" {
  description = "Hostname -> address and properties of the host."
  value = {
    for name, host in google_compute_instance.host : name => {
      address      = host.network_interface[0].network_ip
      zone         = host.zone
      instance_id  = host.instance_id
      self_link    = host.self_link
      role         = var.hosts[name].role
      partition    = var.hosts[name].partition
      machine_type = host.machine_type
    }
  }
}
