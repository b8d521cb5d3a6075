"""Tests: unit, kernels, engine, and the numpy reference that they are held against."""
