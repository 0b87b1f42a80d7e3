"""Kernels in C for CPUs: attention that is row invariant by construction, and drawing tokens."""
