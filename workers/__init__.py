"""Target and draft workers: everything that runs a model. Knows neither Ray nor HTTP."""
