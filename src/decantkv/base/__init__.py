"""What every room may use: option checks, versions, transfers between devices, text that a terminal shows."""
