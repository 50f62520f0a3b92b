"""The method's mathematics, made to run: an oracle, bounds, exhaustive search, and `verify`."""
