"""Messages between processes, and the connections that carry them."""
