"""Evidence: evaluation, benchmarks, theory, pages, sizing and diagnosis. Imports the library, never the other way."""
