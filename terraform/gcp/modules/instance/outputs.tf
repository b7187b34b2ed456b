output "host" {
  description = "Address and properties of the host."
  value = {
    address      = google_compute_instance.host.network_interface[0].network_ip
    zone         = google_compute_instance.host.zone
    instance_id  = google_compute_instance.host.instance_id
    self_link    = google_compute_instance.host.self_link
    role         = var.host.role
    partition    = var.host.partition
    machine_type = google_compute_instance.host.machine_type
  }
}
