"""World models, and the start states that imagined episodes begin from."""
