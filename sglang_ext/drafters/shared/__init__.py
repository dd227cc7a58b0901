"""What several families have in common: a layer over features (EAGLE), or one vector a request (Medusa, for one)."""
