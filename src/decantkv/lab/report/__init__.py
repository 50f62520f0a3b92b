"""One self-contained page from folders of results."""
