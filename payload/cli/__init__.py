"""Input and output of commands: flags and config files, printed lines and JSON Lines files."""
