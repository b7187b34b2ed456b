"""Utilities: processes, parallel calls, data files, templates, progress, redaction."""
