"""Eviction inside serving engines; importing this imports none of them."""
