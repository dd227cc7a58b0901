"""What drafters are trained on: prompts, and the target's own answers to them."""
