"""The Ray Serve application: the front door, the round, and the pools of workers behind them."""
