"""Models from simulator recordings: policy cloning, VAE, world model, reward model."""
