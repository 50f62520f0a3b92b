"""Helpers for all rooms: option checks, versions, transfers between devices, text for a terminal."""
