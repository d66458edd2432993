"""The control plane in virtual time over modelled hardware. Never imports `backends`."""
