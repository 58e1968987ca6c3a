"""ManiSkill3's tasks as simulators."""
