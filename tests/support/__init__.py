"""Helpers of the tests: the judge, tiny models, families of architectures, interrupts, ranks of a parallel run."""
