"""The protocols; `make proto` regenerates the modules."""
