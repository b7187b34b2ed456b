"""Facts about hosts, collected over SSH, and checks of these facts."""
