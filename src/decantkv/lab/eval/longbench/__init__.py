"""LongBench (THUDM/LongBench, MIT): the sixteen English and code tasks."""
