"""Training: the corpus, the demo target and the draft heads. Plain torch; nothing here knows Ray or SGLang."""
