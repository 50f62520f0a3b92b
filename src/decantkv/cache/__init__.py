"""The evicting cache: its layers, the stores that hold kept tokens, files, reports."""
