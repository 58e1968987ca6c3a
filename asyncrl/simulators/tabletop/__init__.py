"""The shipped simulator: pick the named cube and put it on the named plate."""
