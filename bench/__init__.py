"""Benches: each prints a table and its checks, then one JSON line. Run from the project's root."""
