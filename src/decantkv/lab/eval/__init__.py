"""Evidence: RULER, LongBench, fidelity and needle suites, run with one prefill a prompt for every method and budget."""
