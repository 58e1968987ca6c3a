"""Success of a policy in the true simulator, and pictures of it next to imagination."""
