"""Refits the world of a run on true episodes of its policy (PACE of WoVR, arXiv 2602.13977, section 4.3)."""
