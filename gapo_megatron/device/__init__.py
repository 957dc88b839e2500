"""Work that must not make the host wait for the device."""
