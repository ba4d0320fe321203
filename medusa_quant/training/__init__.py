"""Training of heads on their base's own text, from nothing or from heads to be recovered."""
