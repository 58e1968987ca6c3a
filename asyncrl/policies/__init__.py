"""Vision-language-action policies: frames and an instruction in, action tokens and log-probs out."""
