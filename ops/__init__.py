"""Kernels with one call each: a plain-torch reference, fast paths, one dispatch. Imports nothing of ``hybrid``."""
