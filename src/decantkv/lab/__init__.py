"""Evidence: evaluation, benchmarks, theory, pages, sizing and diagnosis. Imports the library, never the other way."""

from decantkv.base.extras import expect_packages

expect_packages("decantkv.lab", "cli", "filelock", "rich", "typer")
