"""The draft worker: runs ahead of the target with drafters of any kind."""
