"""Ansible: the inventory file, playbook runs, and what they report."""
