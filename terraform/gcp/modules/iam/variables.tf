variable "project" {
  description = "Id of the project."
  type        = string
}

variable "prefix" {
  description = "Prefix of the accounts' names."
  type        = string

  validation {
    condition     = length(var.prefix) <= 28
    error_message = "A service account's name has at most 30 characters, and the role needs two of them."
  }
}

variable "mark" {
  description = "Text in the description of resources without labels, by which teardown finds them."
  type        = string
}
