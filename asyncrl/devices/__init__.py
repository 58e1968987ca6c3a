"""Tensors and devices: copies that wait for nothing, CUDA graphs, events, memory and offloading."""
