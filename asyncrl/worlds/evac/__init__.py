"""The EVAC (EnerVerse-AC) world: a video diffusion network, its conditions, its sampler, its files."""
