"""What goes in, as flags and config files, and what comes out, as lines and records."""
