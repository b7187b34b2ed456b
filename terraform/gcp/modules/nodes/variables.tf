variable "project" {
  description = "Id of the project."
  type        = string
}

variable "region" {
  description = "Region of the placement policies."
  type        = string
}

variable "hosts" {
  description = "The nodes by their hostname; the instance module knows the type."
  type        = any
}

variable "placements" {
  description = "Names of the compact placement policies that nodes are in."
  type        = set(string)
}

variable "mark" {
  description = "Words in the description of what can't carry labels, by which teardown finds it."
  type        = string
}

variable "common" {
  description = "What all hosts have in common; the instance module knows the type."
  type        = any
}

variable "service_account" {
  description = "Email of the account that nodes act as."
  type        = string
}

variable "manageable" {
  description = "Whether the controller may delete nodes."
  type        = bool
}
