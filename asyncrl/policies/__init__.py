"""Vision-language-action policies: interface, the shipped ones, and their files."""
