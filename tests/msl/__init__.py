"""Executes Metal source on the CPU for tests; not part of the installed package."""
