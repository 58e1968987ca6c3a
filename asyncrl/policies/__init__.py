"""Vision-language-action policies: what they offer, the shipped ones, and their files."""
