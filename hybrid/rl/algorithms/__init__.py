"""What the on-policy algorithms compute: one file of pure functions for each, and a table of them."""
