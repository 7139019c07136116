"""What this machine and this model are, and who else is using the device."""
