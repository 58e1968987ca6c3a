"""How good a policy is in the true simulator, and pictures of it beside imagination."""
