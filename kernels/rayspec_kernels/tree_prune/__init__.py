"""Which candidates of a draft tree are verified, by any score of theirs."""
