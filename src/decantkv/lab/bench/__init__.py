"""Measurements: nothing in the library depends on them."""
