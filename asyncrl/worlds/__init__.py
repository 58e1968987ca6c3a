"""World models: start states and actions come in, imagined frames go out."""
