"""New policy weights travel from the learner to the actors."""
