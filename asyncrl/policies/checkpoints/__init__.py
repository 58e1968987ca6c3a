"""Policy folders: our layout, the published ones, adapters, and conversion between them."""
