"""The HTTP front door in OpenAI's shapes."""
