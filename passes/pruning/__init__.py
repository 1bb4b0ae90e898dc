"""Structure and weights taken out of a model."""
