variable "project" {
  description = "Id of the project."
  type        = string
}

variable "prefix" {
  description = "First part of the accounts' names."
  type        = string

  validation {
    condition     = length(var.prefix) <= 28
    error_message = "A service account's name has at most 30 characters, two of which tell the role."
  }
}

variable "mark" {
  description = "Words in the description of what can't carry labels, by which teardown finds it."
  type        = string
}
