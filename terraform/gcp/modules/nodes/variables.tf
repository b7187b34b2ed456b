variable "project" {
  description = "Id of the project."
  type        = string
}

variable "region" {
  description = "Region of the placement policies."
  type        = string
}

variable "hosts" {
  description = "Hostname -> node. The module instance declares the type."
  type        = any
}

variable "placements" {
  description = "Names of the compact placement policies of the nodes."
  type        = set(string)
}

variable "mark" {
  description = "Text in the description of resources without labels, by which teardown finds them."
  type        = string
}

variable "common" {
  description = "Common properties of all hosts. The module instance declares the type."
  type        = any
}

variable "service_account" {
  description = "Email of the nodes' service account."
  type        = string
}

variable "manageable" {
  description = "Whether the controller may delete nodes."
  type        = bool
}
