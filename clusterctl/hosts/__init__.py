"""Facts about hosts, and checks of these facts."""
