"""OpenVLA and OpenVLA-OFT on transformers' Llama."""
