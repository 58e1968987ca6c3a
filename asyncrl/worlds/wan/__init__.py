"""The Wan world model: transformer, autoencoder, tiny decoder, and its published files."""
