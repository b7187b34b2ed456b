"""Ansible: inventory files, playbook runs and their results."""
