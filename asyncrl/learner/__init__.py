"""The learner turns groups of episodes into policy updates."""
