"""Carriers of weights from the learner to the actors: one module per transport."""
