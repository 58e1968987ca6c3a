"""The OpenSora world model: action-conditioned STDiT3, frame-wise autoencoder, and its published files."""
