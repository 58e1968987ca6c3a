"""Transfer of policy weights from the learner to the actors."""
