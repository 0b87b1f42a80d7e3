"""Load and benchmarks, from outside the server."""
