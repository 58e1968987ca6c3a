"""What carries weights from the learner to the actors: one module per transport."""
