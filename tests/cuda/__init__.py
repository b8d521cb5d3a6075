"""Tests of the CUDA module that need no GPU."""
