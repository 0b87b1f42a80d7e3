"""The page in the browser: a chat that shows how its answers are made, and the pools of workers."""
