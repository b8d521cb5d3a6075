"""Tests of ds41: unit, kernels, engine, and the independent numpy reference they are held against."""
