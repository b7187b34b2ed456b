"""The settings of each provider in a spec, and the starter of its specs, which `init` writes."""
